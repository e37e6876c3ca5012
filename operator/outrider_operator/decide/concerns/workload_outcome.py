"""The concern of the serving pods: their children, and the conditions of the rollout and the endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_crds.conditions import ConditionReason, ConditionType
from outrider_crds.rollout_status import RevisionStatus
from outrider_crds.runtime_config import PRODUCT_ANNOTATION

from outrider_operator.cluster_model import LEADER_WORKER_SET, Object, groups_name
from outrider_operator.decide.concerns.canary_outcome import canary_hot_map
from outrider_operator.decide.concerns.gateway_outcome import picker_peers
from outrider_operator.decide.concerns.rollout_conditions import progressing, updated
from outrider_operator.decide.concerns.rollout_view import RolloutView
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome, Verdict, Verdicts, earliest_s, false, true, unknown
from outrider_operator.decide.ownership import selector
from outrider_operator.decide.pods.pod_states import LOOK_AGAIN_S, Pods, revision_of
from outrider_operator.decide.pods.pod_troubles import is_being_created
from outrider_operator.decide.specification import unreadable_spec
from outrider_operator.decide.workloads.children import hot_map, serving_objects, unneeded_children
from outrider_operator.decide.workloads.refreshes import plan_refreshes
from outrider_operator.plan import Annotate
from outrider_operator.validation.reading import annotation, integer, is_being_deleted, name_of, text, uid_of


def workload(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Children that serve the intent's revision; conditions Available, Updated, Progressing and Ready."""
    rollout, desired = RolloutView(world, intent), intent.desired
    ready = endpoint_ready(world, desired.spec.replicas)
    waits_s = (rollout.capacity_check_s, rollout.deadline_check_s, rollout.groups_check_s, _polling_s(world, rollout))
    writes = _writes(world, intent) if intent.scales else ConcernOutcome()
    running = desired.running
    return ConcernOutcome(
        objects=writes.objects,
        unwanted=writes.unwanted,
        adopt=writes.adopt,
        conditions={
            ConditionType.AVAILABLE: available(world.pods, desired.replicas),
            ConditionType.UPDATED: updated(rollout, world.unreachable),
            ConditionType.PROGRESSING: progressing(rollout),
            ConditionType.READY: ready,
        },
        status={
            **counts(world),
            "revision": RevisionStatus(name=running.name, phase=rollout.phase()) if running is not None else None,
            "accelerator": ",".join(desired.spec.accelerator.products),
            "runtime_image": desired.running_image,
            "newer_runtime_image": desired.newer_image,
        },
        wake_after_s=earliest_s(waits_s),
    )


def without_spec(world: ServiceWorld) -> ConcernOutcome:
    """ConcernOutcome for a spec that cannot be read: nothing is applied, and the status reports the pods that serve."""
    problem = unreadable_spec(world.unreadable_reason)
    replicas = _written_replicas(world)
    pending = unknown(ConditionReason.PENDING, "The spec cannot be read; see SpecValid.")
    conditions: Verdicts = {
        **dict.fromkeys(ConditionType, pending),
        ConditionType.SPEC_VALID: problem,
        ConditionType.AVAILABLE: available(world.pods, replicas),
        ConditionType.UPDATED: problem,
        ConditionType.READY: endpoint_ready(world, replicas),
    }
    return ConcernOutcome(conditions=conditions, status=counts(world))


def pod_notes(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Annotations of pods: the product that a pod runs on, and a touch if its hot config changed."""
    if not intent.scales:
        return ConcernOutcome()
    children, canary, states = world.children, intent.canary, world.observed.states
    serving = plan_refreshes(children, hot_map(children.owner, intent.desired.hot), world.pods, states)
    touched = ConcernOutcome()
    if canary.hot is not None and not canary.is_frozen:
        touched = plan_refreshes(children, canary_hot_map(canary), world.canary_pods, states)
    return ConcernOutcome(
        annotate=(*_product_notes(world, intent), *serving.annotate, *touched.annotate),
        wake_after_s=earliest_s((serving.wake_after_s, touched.wake_after_s)),
    )


def counts(world: ServiceWorld) -> Mapping[str, Any]:
    """Fields of the status that need no spec."""
    workload = world.children.workload or {}
    return {
        "observed_generation": world.observed.generation,
        "nodes": _pods_per_replica(world),
        "replicas": _scale(world),
        "ready_replicas": len(world.pods.ready) + len(world.canary_pods.ready),
        "updated_replicas": integer(workload, "status", "updatedReplicas"),
        "ready_revision": world.ready_revision,
        "selector": ",".join(f"{name}={value}" for name, value in selector(world.children.owner.name).items()),
    }


def _scale(world: ServiceWorld) -> int:
    """Pods that serve, as the scale subresource reports them: canaries count, and the surge of a rollout does not.

    An autoscaler takes what it reads as the size of today, so that a held rollout grew by a pod for good."""
    parsed, children = world.observed.parsed, world.children
    requested = _written_replicas(world) if isinstance(parsed, str) else parsed.replicas
    return min(
        requested, sum(integer(pods or {}, "status", "replicas") for pods in (children.workload, children.canary))
    )


def _written_replicas(world: ServiceWorld) -> int:
    """Replicas of a service whose spec cannot be read: as many as before, or at least one."""
    workload = world.children.workload
    if workload is not None:
        return integer(workload, "spec", "replicas")
    return integer(world.observed.service, "spec", "replicas") or 1


def _writes(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """The children, and what is no longer needed of them. A canary's revision stays."""
    children, desired, canary = world.children, intent.desired, intent.canary
    peers = world.settings.admin_port_peers
    objects = serving_objects(children, desired, (*peers, *picker_peers(children, desired.spec)) if peers else ())
    in_use = {revision_of(owner) for owner in (*world.observed.replica_sets, *world.observed.pods)}
    if canary.revision is not None:
        in_use.add(canary.revision.name)
    return unneeded_children(children, desired, in_use, objects)


def _polling_s(world: ServiceWorld, rollout: RolloutView) -> float | None:
    """Seconds until the next look at pods whose progress no watch delivers."""
    is_starting = any(is_being_created(pod) for pod in world.pods.with_workers)
    return LOOK_AGAIN_S if is_starting or rollout.is_node_awaited else None


def _pods_per_replica(world: ServiceWorld) -> int | None:
    """Pods of a group; None where a replica is one pod. It is reported until the last group is gone."""
    children = world.children
    groups = children.documents.get((LEADER_WORKER_SET, groups_name(children.owner.name)))
    size = integer(groups, "spec", "leaderWorkerTemplate", "size") if children.groups is not None else 0
    nodes = integer(world.observed.service, "spec", "engine", "nodes")
    return size or (nodes if nodes > 1 else None)


def _product_notes(world: ServiceWorld, intent: Intent) -> list[Annotate]:
    """Annotations that tell pods which have a node its product, which the node's label names."""
    products = {
        node.name: node.labels.get(intent.spec.accelerator.product_label) for node in world.observed.nodes or ()
    }
    pods = (*world.pods.with_workers, *world.canary_pods.living)
    return [
        Annotate(name_of(pod), uid_of(pod), {PRODUCT_ANNOTATION: product})
        for pod in pods
        if (product := products.get(text(pod, "spec", "nodeName"))) and _lacks_product(pod)
    ]


def _lacks_product(pod: Object) -> bool:
    return not (annotation(pod, PRODUCT_ANNOTATION) or is_being_deleted(pod))


def available(pods: Pods, replicas: int) -> Verdict:
    """True when at least spec.replicas pods are ready."""
    if replicas == 0:
        return true(ConditionReason.SCALED_TO_ZERO, "spec.replicas is 0.")
    count = len(pods.ready)
    if count >= replicas:
        return true(ConditionReason.ENOUGH_READY_PODS, f"{replicas} of {replicas} pods are ready.")
    return lacking(pods, ConditionReason.TOO_FEW_READY_PODS, f"{count} of {replicas} pods are ready")


def endpoint_ready(world: ServiceWorld, replicas: int) -> Verdict:
    """True while at least one pod can answer. A pod of a draft canary answers as the others do."""
    pods, canaries = world.pods, world.canary_pods
    if replicas == 0:
        return false(ConditionReason.SCALED_TO_ZERO, "spec.replicas is 0: nothing answers.")
    if (pods.ready or canaries.ready) and not world.children.are_reachable:
        return false(
            ConditionReason.NO_READY_ENDPOINT,
            "Pods are ready, but no Service of Outrider's leads to them; see SpecValid.",
        )
    if canaries.ready and not pods.ready:
        return true(ConditionReason.ENDPOINT_READY, f"A canary pod answers. {_sentence('No other pod is ready', pods)}")
    return ready_if_any(pods)


def ready_if_any(pods: Pods) -> Verdict:
    if pods.ready:
        return true(ConditionReason.ENDPOINT_READY, "At least one pod answers.")
    return lacking(pods, ConditionReason.NO_READY_ENDPOINT, "No pod is ready")


def lacking(pods: Pods, otherwise: ConditionReason, start: str) -> Verdict:
    """False with the trouble of pods that are not ready, else `otherwise`. start: how the sentence begins."""
    trouble = pods.trouble()
    return false(trouble.reason if trouble is not None else otherwise, _sentence(start, pods))


def _sentence(start: str, pods: Pods) -> str:
    why = pods.why_not_ready().rstrip(".")
    return f"{start}. {why}." if why else f"{start}."
