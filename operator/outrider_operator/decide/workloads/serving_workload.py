"""The object that makes the serving pods: a Deployment, or a LeaderWorkerSet for a target over several nodes.

A replica of a LeaderWorkerSet is a group of pods. Its leader is the pod that a Deployment would make: it answers
requests and reports; its workers join it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from outrider_crds.base import seconds
from outrider_crds.rollout_settings import Rollout

from outrider_operator.cluster_model import (
    COMPONENT_LABEL,
    DEPLOYMENT,
    LEADER_WORKER_SET,
    WORKER,
    Object,
    ServiceIdentity,
    groups_name,
)
from outrider_operator.decide.desired import revisions, rollout_gate
from outrider_operator.decide.desired.desired_state import IMAGE_ANNOTATION, DesiredState, hardware
from outrider_operator.decide.ownership import Children, child_document, selector
from outrider_operator.validation.reading import annotation, integer, items, mapping

_HISTORY = 2
_OF_A_LEADER = ("ports", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe")
"""Fields of the runtime container that a worker lacks: it listens to its leader alone, and ends when that is gone."""


def workload(owner: ServiceIdentity, desired: DesiredState, revision: revisions.Revision) -> Object:
    """The object that runs `revision`."""
    make = leader_worker_set if _kind(revision) == LEADER_WORKER_SET else deployment
    return make(owner, desired, revision)


def waits_to_change_kind(children: Children, desired: DesiredState, revision: revisions.Revision) -> bool:
    """Is the service paused before the first pod of the kind that `revision` needs?"""
    kinds = {present["kind"] for present in children.workloads}
    return desired.spec.paused and bool(kinds) and _kind(revision) not in kinds


def predecessors(children: Children, desired: DesiredState) -> list[Object]:
    """The workload of the other kind at the scale of `desired`, while its pods serve for a new kind that must wait."""
    revision = desired.running
    if revision is None or not (desired.spec.paused or desired.gate.is_closed(revision)):
        return []
    others = [other for other in children.workloads if other["kind"] != _kind(revision)]
    stored = {revision.name: revision for revision in desired.stored}
    return [
        _scaled(children.owner, desired, other, stored[name])
        for other in others
        if (name := revisions.revision_in(other)) in stored
    ]


def _scaled(owner: ServiceIdentity, desired: DesiredState, present: Object, revision: revisions.Revision) -> Object:
    """`present`, which runs `revision`, with the replicas of `desired`. It keeps the image that it was made with."""
    made = workload(owner, replace(desired, gate=desired.gate.of(present)), revision)
    image = {IMAGE_ANNOTATION: annotation(present, IMAGE_ANNOTATION)}
    metadata = made["metadata"]
    return {**made, "metadata": {**metadata, "annotations": {**metadata["annotations"], **image}}}


def superseded(children: Children, desired: DesiredState) -> list[Object]:
    """The workload of the other kind, once as many replicas of `desired` are ready: engine.nodes was changed."""
    current, revision = children.workload, desired.running
    others = [other for other in children.workloads if other["kind"] != (current or {}).get("kind")]
    if desired.spec.paused or current is None or revision is None or revisions.revision_in(current) != revision.name:
        return []
    is_open = not desired.gate.is_closed(revision) and integer(current, "spec", "replicas") == desired.replicas
    is_observed = integer(current, "status", "observedGeneration") >= integer(current, "metadata", "generation")
    is_enough = integer(current, "status", "availableReplicas") >= desired.replicas
    return others if is_open and is_observed and is_enough else []


def _kind(revision: revisions.Revision) -> str:
    return LEADER_WORKER_SET if revision.boot.engine.nodes > 1 else DEPLOYMENT


def deployment(owner: ServiceIdentity, desired: DesiredState, revision: revisions.Revision) -> Object:
    """The Deployment that runs `revision`. Its replicas follow spec.replicas, which autoscalers write."""
    spec = {
        "replicas": _replicas(desired, revision),
        "paused": desired.spec.paused,
        "revisionHistoryLimit": _HISTORY,
        **_pace(desired.spec.rollout, is_held=desired.gate.is_closed(revision)),
        "selector": {"matchLabels": selector(owner.name)},
        "template": revision.template,
    }
    return child_document(owner, DEPLOYMENT, owner.name, annotations=_annotations(desired, revision), spec=spec)


def _annotations(desired: DesiredState, revision: revisions.Revision) -> dict[str, str]:
    """Annotations of the workload, from which a lost revision is made again and an upgrade of the operator learns."""
    kind = hardware(on_cpu=revision.boot.accelerator.on_cpu)
    return {
        IMAGE_ANNOTATION: f"{kind} {desired.running_image}",
        **revisions.revision_annotations(revision),
        **({revisions.READY_ANNOTATION: desired.ready_revision} if desired.ready_revision else {}),
    }


def _replicas(desired: DesiredState, revision: revisions.Revision) -> int:
    gate = desired.gate
    if gate.in_groups and gate.is_closed(revision):  # the first pod starts next to the groups that serve
        return min(desired.replicas, 1)
    return gate.scaled(revision, desired.replicas, _held_surge(desired.spec.rollout))


def _held_surge(rollout: Rollout) -> int:
    """maxSurge at a closed gate. Either it or maxUnavailable is 1; both would admit two new pods.

    If `max_unavailable` allows, the first new pod replaces an old one: there may be no node for a surge pod.
    """
    return 0 if rollout.max_unavailable else 1


def _pace(rollout: Rollout, *, is_held: bool) -> Object:
    """Limits of a rollout. At a closed gate it stops after one new pod, which never becomes available
    (see `rollout_gate`)."""
    if not is_held:
        deadline_s = max(1, math.ceil(seconds(rollout.progress_deadline)))
        strategy = _strategy(rollout.max_surge, rollout.max_unavailable)
        return {"progressDeadlineSeconds": deadline_s, "strategy": strategy}
    surge = _held_surge(rollout)
    strategy = _strategy(surge, 1 - surge)
    return {
        "minReadySeconds": rollout_gate.HOLD_S,
        "progressDeadlineSeconds": rollout_gate.DEADLINE_S,
        "strategy": strategy,
    }


def _strategy(max_surge: int, max_unavailable: int) -> Object:
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": max_surge, "maxUnavailable": max_unavailable},
    }


def pods_are_placed(children: Children, desired: DesiredState) -> bool:
    """False between a change of the Deployment and its new pods, which should be scheduled before Jobs."""
    if desired.spec.replicas == 0 or desired.running is None:
        return True
    current = children.workload
    if current is None or revisions.current_revision_name(children) != desired.running.name:
        return False
    is_observed = integer(current, "status", "observedGeneration") == integer(current, "metadata", "generation")
    created, updated = integer(current, "status", "replicas"), integer(current, "status", "updatedReplicas")
    return is_observed and created >= desired.replicas and updated > 0


def leader_worker_set(owner: ServiceIdentity, desired: DesiredState, revision: revisions.Revision) -> Object:
    """The LeaderWorkerSet that runs `revision`. A pod that restarts takes its group along: its ranks are gone."""
    is_held = desired.gate.is_closed(revision)
    replicas = _groups(desired, revision)
    is_shrunk = is_held and desired.gate.shrinks(replicas)
    annotations = {
        **_annotations(desired, revision),
        **({rollout_gate.HOLD_ANNOTATION: rollout_gate.HOLD} if is_held else {}),
        **({rollout_gate.SHRUNK_ANNOTATION: rollout_gate.SHRUNK} if is_shrunk else {}),
    }
    spec = {
        "replicas": replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": _pace_of_groups(desired, replicas, is_held=is_held, is_shrunk=is_shrunk),
        },
        "leaderWorkerTemplate": {
            "size": revision.boot.engine.nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": revision.template,
            "workerTemplate": worker_template(revision.template),
        },
    }
    return child_document(owner, LEADER_WORKER_SET, groups_name(owner.name), annotations=annotations, spec=spec)


def worker_template(leader: Object) -> Object:
    """The pod template of a group's workers. It follows from the leader's alone: an upgrade restarts no pod."""
    spec = mapping(leader, "spec")
    runtime, *others = items(spec, "containers")
    bare = {name: value for name, value in runtime.items() if name not in _OF_A_LEADER}
    metadata = mapping(leader, "metadata")
    return {
        "metadata": {**metadata, "labels": {**mapping(metadata, "labels"), COMPONENT_LABEL: WORKER}},
        "spec": {**spec, "containers": [bare, *others]},
    }


def _groups(desired: DesiredState, revision: revisions.Revision) -> int:
    """Groups to have now. A closed gate lets one start next to a Deployment's pods.

    A held rollout does not grow, since new groups would be of the new revision.
    """
    gate = desired.gate
    if not gate.is_closed(revision):
        return desired.replicas
    return min(desired.replicas, gate.replicas if gate.in_groups else 1)


def _pace_of_groups(desired: DesiredState, replicas: int, *, is_held: bool, is_shrunk: bool) -> Object:
    """Limits of a rollout. Groups below `partition` keep their revision: at a closed gate all but the first new one,
    which takes the place of the last old one if `max_unavailable` allows, else comes on top.

    After a scale-down it comes on top, too: the last old group may be the only one, and nodes are free.
    """
    rollout = desired.spec.rollout
    if desired.spec.paused:
        return {"partition": replicas, "maxSurge": 0, "maxUnavailable": 1}
    if not is_held:
        return {"partition": 0, "maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable}
    if rollout.max_unavailable and not is_shrunk:
        return {"partition": max(0, replicas - 1), "maxSurge": 0, "maxUnavailable": 1}
    return {"partition": replicas, "maxSurge": 1, "maxUnavailable": 0}
