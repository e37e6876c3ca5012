"""decide(observed, settings) -> Plan: everything that the operator decides, without any I/O.

The layers, lowest first: `ownership`, `drift` and `pod_states` read the cluster's objects. `pod_spec` writes pod
templates. `revisions`, `runtime_image`, `profile_store`, `rollout_gate` and `desired_state` turn the spec into what
should run; `readable_spec` reads what a spec of another release has in common with this one. `workloads` and
`profiling` plan children and Jobs, and `model_download` plans the Job that a rollout may wait for. `canary` measures a
changed draft pool before it is rolled out. `figures` turns counters into numbers, and `conditions` writes the status.
"""

from __future__ import annotations

from dataclasses import replace

from outrider_crds.base import seconds
from outrider_crds.profile import REPROFILE_ANNOTATION
from outrider_crds.rollout_settings import RolloutStrategy
from outrider_crds.spec import ProfilingMode, SpeculativeServiceSpec
from outrider_crds.status import ConditionReason, ConditionType, SpeculativeServiceStatus

from outrider_operator.cluster_model import (
    CANARY_TRACK,
    CONFIG_MAP,
    INFERENCE_POOL,
    NETWORK_POLICY,
    PREFETCH,
    SERVICE_ACCOUNT,
    SERVING,
    TRACK_LABEL,
    Object,
    Observed,
    OperatorSettings,
    canary_names,
    child_names,
    groups_names,
    is_over_nodes,
    revision_map_name,
)
from outrider_operator.decide.canary.canary_objects import canary_children, canary_hot_map
from outrider_operator.decide.canary.draft_canary import CanaryRollout, canary_rollout
from outrider_operator.decide.conditions.canary import canary_events
from outrider_operator.decide.conditions.gateway import pool_ready
from outrider_operator.decide.conditions.kstatus import with_kstatus
from outrider_operator.decide.conditions.network import explained, why_unreachable
from outrider_operator.decide.conditions.pod_availability import available, endpoint_ready
from outrider_operator.decide.conditions.pod_groups import look_at_groups_s, no_groups, no_names, pods_per_replica
from outrider_operator.decide.conditions.profile_conditions import ProfileInputs
from outrider_operator.decide.conditions.rollout import (
    RolloutView,
    is_node_awaited,
    next_capacity_check_s,
    next_deadline_check_s,
)
from outrider_operator.decide.conditions.specification import child_rejected, spec_problem, unreadable_spec
from outrider_operator.decide.conditions.status_changes import events, with_verdicts
from outrider_operator.decide.conditions.status_inputs import StatusInputs, fields, verdicts
from outrider_operator.decide.conditions.verdict import Verdict, Verdicts, unknown
from outrider_operator.decide.desired_state import (
    DesiredState,
    RolloutEvidence,
    desired_state,
    keep_current,
    unread_profiles,
)
from outrider_operator.decide.figures.behaviour import MeasuredBehaviour
from outrider_operator.decide.model_download import Prefetch, plan_prefetch, prefetch_of
from outrider_operator.decide.ownership import Children, selector
from outrider_operator.decide.pod_spec.placement import has_node
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pod_states import LOOK_AGAIN_S, Pods, pods_of, revision_of
from outrider_operator.decide.pod_troubles import is_being_created
from outrider_operator.decide.profile_store import Profiles
from outrider_operator.decide.profiling.jobs import plan_jobs
from outrider_operator.decide.profiling.known_profiles import Sources, sources_of, unread_sources
from outrider_operator.decide.profiling.product_profiles import (
    ProductProfile,
    ProfilingView,
    product_profiles,
    stale_in_s,
)
from outrider_operator.decide.profiling.profile_maps import plan_profile_maps
from outrider_operator.decide.profiling.shared_profiles import plan_shared_profiles
from outrider_operator.decide.readable_spec import readable_spec
from outrider_operator.decide.revisions import (
    current_revision,
    ready_revision,
    revision_in,
    stored_revisions,
    unread_canary_maps,
    unread_map,
    unread_maps,
)
from outrider_operator.decide.rollout_gate import gate_of
from outrider_operator.decide.runtime_image import runtime_images
from outrider_operator.decide.workloads.children import (
    Further,
    WorkloadPlan,
    plan_products,
    plan_workloads,
    rollout_refusal,
)
from outrider_operator.decide.workloads.inference_pool import picker_peers, plan_pool
from outrider_operator.decide.workloads.refreshes import Refreshes, plan_refreshes
from outrider_operator.decide.workloads.services import hot_map, network_policy_name, stored_hot
from outrider_operator.decide.workloads.serving_deployment import pods_are_placed
from outrider_operator.plan import Plan
from outrider_operator.validation.reading import annotation, integer, is_being_deleted, label, name_of

__all__ = ["decide"]


def decide(observed: Observed, settings: OperatorSettings) -> Plan:
    """Plan the next step that brings the cluster nearer to the service's spec. Never raises on odd input."""
    if is_being_deleted(observed.service):  # garbage collection takes the children
        return Plan(status=observed.status)
    children = Children(observed.identity, observed.children, over_nodes=is_over_nodes(observed.service))
    pods = _pods(observed, children.workload, is_canary=False)
    if unread := unread_maps(children, observed.replica_sets):
        return Plan(status=observed.status, read=tuple(unread))
    unreadable_reason = observed.parsed if isinstance(observed.parsed, str) else ""
    spec = _readable(observed, children) if isinstance(observed.parsed, str) else observed.parsed
    if spec is None:
        return _plan_without_spec(observed, children, pods, unreadable_reason)
    profiles = Profiles(observed.profiles)
    evidence = RolloutEvidence(
        ready_revision=_ready_revision(observed, children, pods),
        ready_now=_ready(pods),
        with_node=_products_with_node(observed, pods, spec),
        gate=gate_of(children, observed.replica_sets, pods, observed.states, spec),
    )
    desired = _desired(observed, settings, children, profiles, spec, evidence)
    unread = [*unread_map(children, desired.spec_revision), *unread_profiles(profiles, desired.spec_revision)]
    if unread := [*unread, *unread_canary_maps(children, desired.spec_revision.name)]:
        return Plan(status=observed.status, read=tuple(unread))
    sources = sources_of(profiles, Profiles(observed.shared_profiles), settings, desired)
    own, shared = unread_sources(sources, desired)
    if own or shared:
        return Plan(status=observed.status, read=own, read_shared=shared)
    names = _names(children, settings, desired)
    problem = unreadable_spec(unreadable_reason) if unreadable_reason else spec_problem(spec, settings, children, names)
    problem = problem or no_groups(spec, observed.groups_access) or no_names(spec, children)
    prefetch = prefetch_of(observed, children, desired)
    is_blocked = problem is not None or (prefetch is not None and prefetch.holds)
    if is_blocked:
        desired = keep_current(desired, children)  # the pods serve on, and the status reports them
    canary = _canary(observed, settings, children, desired, pods, evidence.proven, is_blocked=is_blocked)
    desired = _with_canary(desired, children, canary)
    view = _profiling_view(observed, sources, pods)
    profiles_by_product = product_profiles(view, desired)
    inputs = _status_inputs(observed, children, pods, desired, profiles_by_product, names, problem, canary, prefetch)
    status_plan = _status_plan(observed, settings, view, inputs, children)
    if problem is None:
        return _with_writes(status_plan, observed, settings, view, children, inputs)
    return (
        status_plan if desired.running is None else _with_scale(status_plan, observed, settings, view, children, inputs)
    )


def _pods(observed: Observed, deployment: Object | None, *, is_canary: bool) -> Pods:
    """The pods of `deployment`: the service's own or its canary's."""
    pods = [pod for pod in observed.pods if (label(pod, TRACK_LABEL) == CANARY_TRACK) is is_canary]
    workers = () if is_canary else observed.workers
    return pods_of(deployment, pods, observed.warnings, observed.at, observed.provisioning, workers)


def _canary(
    observed: Observed,
    settings: OperatorSettings,
    children: Children,
    desired: DesiredState,
    pods: Pods,
    proven: frozenset[str],
    *,
    is_blocked: bool,
) -> CanaryRollout:
    canary = _pods(observed, children.canary, is_canary=True)
    return canary_rollout(observed, settings, children, desired, canary, pods, proven, is_blocked=is_blocked)


def _with_canary(desired: DesiredState, children: Children, canary: CanaryRollout) -> DesiredState:
    """Hold the spec's revision back while `canary` measures it, and give up the pods that the canary needs.

    A rollout whose revision never had a ready pod returns to the revision that the candidate is measured against.
    """
    if canary.holds:
        desired = keep_current(desired, children)
    if canary.holds and desired.is_waiting and canary.stable is not None:
        desired = replace(desired, running=canary.stable)
    return replace(desired, surrendered=canary.surrendered, unready_canaries=canary.unready_pods)


def _readable(observed: Observed, children: Children) -> SpeculativeServiceSpec | None:
    """Read the usable parts of a spec that this release does not understand; None if no revision runs."""
    running = current_revision(children, stored_revisions(children, observed.replica_sets))
    if running is None:
        return None
    return readable_spec(observed.service.get("spec") or {}, running, stored_hot(children))


def _desired(
    observed: Observed,
    settings: OperatorSettings,
    children: Children,
    profiles: Profiles,
    spec: SpeculativeServiceSpec,
    evidence: RolloutEvidence,
) -> DesiredState:
    """The desired state. A revision that the API server refuses waits; the current one stays at the spec's scale."""
    images = runtime_images(
        observed.service,
        children.workload,
        children.canary,
        observed.status.runtime_image,
        settings,
        on_cpu=spec.accelerator.on_cpu,
    )
    is_legible = not isinstance(observed.parsed, str)
    sets = observed.replica_sets
    desired = desired_state(children, images, sets, profiles, settings, spec, evidence, is_legible=is_legible)
    return keep_current(desired, children) if rollout_refusal(children, desired, observed.refusals) else desired


def _products_with_node(observed: Observed, pods: Pods, spec: SpeculativeServiceSpec) -> frozenset[str]:
    """Products for which a node exists. All of them, without looking, unless a rollout waits for several profiles."""
    products = spec.accelerator.products
    if spec.profiling.mode is not ProfilingMode.REQUIRED or len(products) == 1:
        return frozenset(products)
    return frozenset(name for name in products if has_node(observed.nodes, spec, name, pods.tolerations))


def _names(children: Children, settings: OperatorSettings, desired: DesiredState) -> list[tuple[str, str]]:
    """(kind, name) of the objects that `desired` needs."""
    service = children.owner.name
    policy = [(NETWORK_POLICY, network_policy_name(service))] if settings.admin_port_peers else []
    is_canary = desired.spec.rollout.strategy is RolloutStrategy.DRAFT_CANARY
    canary = canary_names(service) if is_canary else ()
    groups = groups_names(service, has_policy=bool(policy)) if desired.spec.engine.nodes > 1 else ()
    named_account = {"serviceAccountName", "serviceAccount"} & set(desired.spec.pod_template.others)
    return [
        *(key for key in child_names(service) if not (named_account and key[0] == SERVICE_ACCOUNT)),
        (CONFIG_MAP, revision_map_name(service, desired.spec_revision.name)),
        *policy,
        *canary,
        *groups,
    ]


def _status_plan(
    observed: Observed, settings: OperatorSettings, view: ProfilingView, inputs: StatusInputs, children: Children
) -> Plan:
    """The plan without writes: status, events, and when to reconcile again."""
    status = _status(observed, settings, inputs, children)
    return Plan(
        profiles=tuple(profile_name(profile.keys.target) for profile in inputs.profiles),
        status=status,
        events=(*events(observed.status, status), *canary_events(observed.status, status, inputs.canary)),
        requeue_after_s=_next_look_s(settings, view, inputs.rollout, inputs.profiles),
    )


def _with_writes(
    plan: Plan,
    observed: Observed,
    settings: OperatorSettings,
    view: ProfilingView,
    children: Children,
    inputs: StatusInputs,
) -> Plan:
    """`plan` plus the writes for children, Jobs and profiles of a spec that may be applied."""
    desired, profiles = inputs.rollout.desired, inputs.profiles
    workloads = _workloads(observed, settings, children, desired, canary_children(children, desired, inputs.canary))
    maps = plan_profile_maps(view, desired, profiles)
    shared = plan_shared_profiles(view, settings, desired, profiles)
    prefetch = inputs.rollout.prefetch
    downloads = plan_prefetch(observed, settings, desired, prefetch)
    # A Job that measures would download the models as well.
    is_next = pods_are_placed(children, desired) and not (prefetch is not None and prefetch.holds)
    jobs = plan_jobs(view, settings, desired, profiles, pods_are_placed=is_next)
    marks = _marks(observed, view, children, desired, inputs.canary)
    waits = (
        plan.requeue_after_s,
        workloads.requeue_after_s,
        jobs.requeue_after_s,
        marks.requeue_after_s,
        downloads.requeue_after_s,
    )
    return replace(
        plan,
        create=(*workloads.create, *maps.create, *shared.create, *downloads.create, *jobs.create),
        apply=(*maps.apply, *shared.apply, *workloads.apply),
        adopt=(*workloads.adopt, *maps.adopt, *jobs.adopt),
        annotate=marks.annotate,
        delete=(*workloads.delete, *maps.delete, *shared.delete, *downloads.delete, *jobs.delete),
        published=frozenset(shared.published),
        shared=frozenset((*maps.stored, *(job.name for job in jobs.delete))),
        requeue_after_s=min((wait for wait in waits if wait is not None), default=None),
    ).without(observed.refusals)


def _with_scale(
    plan: Plan,
    observed: Observed,
    settings: OperatorSettings,
    view: ProfilingView,
    children: Children,
    inputs: StatusInputs,
) -> Plan:
    """`plan` plus the writes that a refused spec still gets: replicas, speculation and SLO classes of the revision that
    runs. Nothing is measured or deleted for it."""
    desired = inputs.rollout.desired
    canary = Further(revisions=frozenset({revision_in(children.canary)}))
    workloads = _workloads(observed, settings, children, desired, canary)
    marks = _marks(observed, view, children, desired, inputs.canary)
    waits = (plan.requeue_after_s, workloads.requeue_after_s, marks.requeue_after_s)
    return replace(
        plan,
        create=workloads.create,
        apply=workloads.apply,
        annotate=marks.annotate,
        requeue_after_s=min((wait for wait in waits if wait is not None), default=None),
    ).without(observed.refusals)


def _workloads(
    observed: Observed, settings: OperatorSettings, children: Children, desired: DesiredState, canary: Further
) -> WorkloadPlan:
    in_use = {revision_of(owner) for owner in (*observed.replica_sets, *observed.pods)}
    pool = plan_pool(children, desired.spec, observed.pool_access)
    further = replace(canary, desired=(*canary.desired, *pool.desired), unwanted=(*canary.unwanted, *pool.unwanted))
    peers = settings.admin_port_peers
    peers = (*peers, *picker_peers(children, desired.spec)) if peers else ()
    planned = plan_workloads(children, desired, in_use, peers, further)
    waits = (planned.requeue_after_s, pool.requeue_after_s)
    return replace(planned, requeue_after_s=min((wait for wait in waits if wait is not None), default=None))


def _marks(
    observed: Observed, view: ProfilingView, children: Children, desired: DesiredState, canary: CanaryRollout
) -> Refreshes:
    """Pod annotations: the product that a pod runs on, and a touch if its hot config changed."""
    pods = _pods(observed, children.canary, is_canary=True)
    living = (*view.pods.with_workers, *pods.living)
    products = plan_products(living, observed.nodes or (), desired.spec.accelerator.product_label)
    serving = plan_refreshes(children, hot_map(children.owner, desired.hot), view.pods, observed.states)
    of_canary = Refreshes()
    if canary.hot is not None and not canary.is_frozen:
        of_canary = plan_refreshes(children, canary_hot_map(children.owner, canary), pods, observed.states)
    waits = [wait for wait in (serving.requeue_after_s, of_canary.requeue_after_s) if wait is not None]
    return Refreshes((*products, *serving.annotate, *of_canary.annotate), min(waits, default=None))


def _profiling_view(observed: Observed, sources: Sources, pods: Pods) -> ProfilingView:
    return ProfilingView(
        owner=observed.identity,
        at=observed.at,
        pods=pods,
        nodes=observed.nodes,
        jobs=observed.jobs,
        job_pods=observed.job_pods,
        sources=sources,
        measured_elsewhere=observed.measured_elsewhere,
        reprofile=annotation(observed.service, REPROFILE_ANNOTATION),
    )


def _status(
    observed: Observed, settings: OperatorSettings, inputs: StatusInputs, children: Children
) -> SpeculativeServiceStatus:
    status = _counted(observed, children, inputs.rollout.pods).model_copy(update=fields(inputs))
    return with_verdicts(status, verdicts(inputs, settings.no_capacity_after_s), observed.generation, observed.at)


def _status_inputs(
    observed: Observed,
    children: Children,
    pods: Pods,
    desired: DesiredState,
    profiles: list[ProductProfile],
    names: list[tuple[str, str]],
    problem: Verdict | None,
    canary: CanaryRollout,
    prefetch: Prefetch | None,
) -> StatusInputs:
    """Gather everything that the status is computed from.

    names: (kind, name) of the objects that the spec needs. problem: why the spec must not be applied.
    """
    states = {name: observed.states[name] for pod in pods.ready if (name := name_of(pod)) in observed.states}
    unreachable = why_unreachable(observed.unreachable, pods.ready, observed.network_policies)
    behaviour = MeasuredBehaviour(
        explained(observed.figures, unreachable), observed.status, states, is_served=bool(pods.ready)
    )
    rewritten = tuple(refusal for refusal in observed.refusals if refusal.is_stored)
    refused = [refusal for refusal in observed.refusals if not refusal.is_stored]
    serving = [refusal for refusal in refused if refusal.component == SERVING and refusal.kind != INFERENCE_POOL]
    profiling = tuple(refusal for refusal in refused if refusal.component not in (SERVING, PREFETCH))
    rollout = RolloutView(
        desired=desired,
        deployment=children.workload,
        pods=pods,
        refused=problem or child_rejected(serving),
        last_progressing=behaviour.last_condition(ConditionType.PROGRESSING),
        terminating=children.terminating(names),
        canary=canary,
        prefetch=prefetch,
    )
    return StatusInputs(
        rollout=rollout,
        behaviour=behaviour,
        profile_inputs=ProfileInputs(desired, pods, states, observed.warnings, profiling),
        profiles=profiles,
        unreachable=unreachable,
        is_reachable=children.are_reachable,
        rewritten=rewritten,
        replica_rivals=observed.replica_rivals,
        canary=canary,
        pool=pool_ready(children, desired.spec, observed.pool_access, observed.refusals),
        generation=observed.generation,
    )


def _plan_without_spec(observed: Observed, children: Children, pods: Pods, why: str) -> Plan:
    """The plan for a spec that cannot be read: nothing is applied, and the status reports the pods that serve."""
    replicas, problem = _replicas(observed, children), unreadable_spec(why)
    verdicts: Verdicts = {
        **{kind: unknown(ConditionReason.PENDING, "The spec cannot be read; see SpecValid.") for kind in ConditionType},
        ConditionType.SPEC_VALID: problem,
        ConditionType.AVAILABLE: available(pods, replicas),
        ConditionType.UPDATED: problem,
        ConditionType.READY: endpoint_ready(
            pods,
            replicas,
            is_reachable=children.are_reachable,
            canaries=len(_pods(observed, children.canary, is_canary=True).ready),
        ),
    }
    status = with_verdicts(_counted(observed, children, pods), with_kstatus(verdicts), observed.generation, observed.at)
    return Plan(status=status, events=events(observed.status, status))


def _replicas(observed: Observed, children: Children) -> int:
    """Replicas of a service whose spec cannot be read: as many as before, or at least one."""
    if children.workload is not None:
        return integer(children.workload, "spec", "replicas")
    return integer(observed.service, "spec", "replicas") or 1


def _counted(observed: Observed, children: Children, pods: Pods) -> SpeculativeServiceStatus:
    """The last status with fresh counts, which need no spec."""
    workload = children.workload or {}
    return observed.status.model_copy(
        update={
            "observed_generation": observed.generation,
            "nodes": pods_per_replica(observed, children),
            "replicas": _scale(observed, children),
            "ready_replicas": len(pods.ready) + len(_pods(observed, children.canary, is_canary=True).ready),
            "updated_replicas": integer(workload, "status", "updatedReplicas"),
            "ready_revision": _ready_revision(observed, children, pods),
            "selector": ",".join(f"{name}={value}" for name, value in selector(children.owner.name).items()),
        }
    )


def _scale(observed: Observed, children: Children) -> int:
    """Pods that serve, as the scale subresource reports them: canaries count, and the surge of a rollout does not.

    An autoscaler takes what it reads as the size of today, so that a held rollout grew by a pod for good."""
    asked = observed.parsed.replicas if not isinstance(observed.parsed, str) else _replicas(observed, children)
    return min(asked, sum(integer(pods or {}, "status", "replicas") for pods in (children.workload, children.canary)))


def _ready(pods: Pods) -> frozenset[str]:
    """Revisions of ready pods."""
    return frozenset(revision_of(pod) for pod in pods.ready)


def _ready_revision(observed: Observed, children: Children, pods: Pods) -> str:
    return ready_revision(children, observed.status.ready_revision, _ready(pods))


def _next_look_s(
    settings: OperatorSettings, view: ProfilingView, rollout: RolloutView, profiles: list[ProductProfile]
) -> float | None:
    """Seconds until time alone changes a decision."""
    desired = rollout.desired
    running = desired.running.name if desired.running is not None else ""
    aging = [stale_in_s(desired, profile.keys, profile.store, view.at) for profile in profiles]
    is_polling = any(is_being_created(pod) for pod in (*view.pods.with_workers, *view.job_pods))
    is_polling = is_polling or is_node_awaited(view.pods, seconds(desired.spec.rollout.progress_deadline), running)
    is_polling = is_polling or any(profile.job_is_active and profile.pod is None for profile in profiles)
    moments = [*aging, next_capacity_check_s(view.pods, settings.no_capacity_after_s, running)]
    moments += [next_deadline_check_s(rollout), LOOK_AGAIN_S if is_polling else None]
    moments += [look_at_groups_s(rollout)]
    moments += [rollout.canary.next_look_s if rollout.canary is not None else None]
    return min((moment for moment in moments if moment is not None and moment > 0), default=None)
