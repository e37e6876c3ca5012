"""decide(observed, settings) -> Plan: everything that the operator decides, without any I/O.

The rooms, lowest first: `ownership`, `drift` and `pods` read what the cluster says;
`pod_spec` writes pods; `revisions`, `runtime_image`, `profile_store`, `rollout_gate` and `intent` say what the spec
asks for; `workloads` and `profiling` decide about children and Jobs; `canary` measures a changed pool before it is
rolled out; `figures` turns counters into numbers; `conditions` tells the user.
"""

from __future__ import annotations

from dataclasses import replace

from outrider_crds.base import seconds
from outrider_crds.profile import REPROFILE_ANNOTATION
from outrider_crds.spec import ProfilingMode, RolloutStrategy, SpeculativeServiceSpec
from outrider_crds.status import ConditionType, Reason, SpeculativeServiceStatus

from outrider_operator.decide.canary.canary_objects import canary_children, canary_hot_map
from outrider_operator.decide.canary.draft_canary import CanaryRollout, canary_rollout
from outrider_operator.decide.conditions.availability import available, endpoint_ready
from outrider_operator.decide.conditions.canary import canary_events
from outrider_operator.decide.conditions.kstatus import with_kstatus
from outrider_operator.decide.conditions.network import explained, why_unheard
from outrider_operator.decide.conditions.profiles import Seen
from outrider_operator.decide.conditions.rollout import (
    Rollout,
    is_node_awaited,
    next_capacity_check_s,
    next_deadline_check_s,
)
from outrider_operator.decide.conditions.served import Served, fields, verdicts
from outrider_operator.decide.conditions.specification import objection, refusal, unreadable
from outrider_operator.decide.conditions.status import events, with_verdicts
from outrider_operator.decide.conditions.verdict import Verdict, Verdicts, unknown
from outrider_operator.decide.figures.behaviour import Behaviour
from outrider_operator.decide.intent import Intent, RolloutEvidence, held, intent, unread_profiles
from outrider_operator.decide.ownership import Children, selector
from outrider_operator.decide.pod_spec.placement import has_node
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pods import LOOK_AGAIN_S, Pods, is_being_created, pods_of, revision_of
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
from outrider_operator.decide.runtime_image import canary_image, default_image, given_image
from outrider_operator.decide.workloads.children import (
    Further,
    WorkloadPlan,
    plan_products,
    plan_workloads,
    rollout_refusal,
)
from outrider_operator.decide.workloads.deployment import pods_are_placed
from outrider_operator.decide.workloads.refreshes import Refreshes, plan_refreshes
from outrider_operator.decide.workloads.services import hot_map, network_policy_name, stored_hot
from outrider_operator.inbound.reading import annotation, integer, is_being_deleted, label, name_of
from outrider_operator.model import (
    CANARY_TRACK,
    CONFIG_MAP,
    NETWORK_POLICY,
    SERVING,
    TRACK_LABEL,
    Object,
    Observed,
    Settings,
    canary_names,
    child_names,
    revision_map_name,
)
from outrider_operator.plan import Plan

__all__ = ["decide"]


def decide(observed: Observed, settings: Settings) -> Plan:
    """The plan that brings the cluster one step nearer to what the service asks for; never raises on odd input."""
    if is_being_deleted(observed.service):  # garbage collection takes the children
        return Plan(status=observed.status)
    children = Children(observed.identity, observed.children)
    pods = _pods(observed, children.deployment, is_canary=False)
    if unread := unread_maps(children, observed.replica_sets):
        return Plan(status=observed.status, read=tuple(unread))
    unfit = observed.parsed if isinstance(observed.parsed, str) else ""
    spec = _readable(observed, children) if isinstance(observed.parsed, str) else observed.parsed
    if spec is None:
        return _unread(observed, children, pods, unfit)
    profiles = Profiles(observed.profiles)
    evidence = RolloutEvidence(
        ready_revision=_ready_revision(observed, children, pods),
        ready_now=_ready(pods),
        with_node=_products_with_node(observed, pods, spec),
        gate=gate_of(children, observed.replica_sets, pods, observed.states, spec),
    )
    asked = _asked(observed, settings, children, profiles, spec, evidence)
    unread = [*unread_map(children, asked.wanted), *unread_profiles(profiles, asked.wanted)]
    if unread := [*unread, *unread_canary_maps(children, asked.wanted.name)]:
        return Plan(status=observed.status, read=tuple(unread))
    sources = sources_of(profiles, Profiles(observed.shared_profiles), settings, asked)
    own, shared = unread_sources(sources, asked)
    if own or shared:
        return Plan(status=observed.status, read=own, read_shared=shared)
    names = _names(children, settings, asked)
    against = unreadable(unfit) if unfit else objection(spec, settings, children, names)
    if against is not None:
        asked = held(asked, children)  # the pods serve on, and all of that is told
    canary = _canary(observed, settings, children, asked, pods, evidence.proven, is_blocked=against is not None)
    asked = _with_canary(asked, children, canary)
    view = _profiling_view(observed, sources, pods)
    found = product_profiles(view, asked)
    served = _served(observed, children, pods, asked, found, names, against, canary)
    told = _told(observed, settings, view, served, children)
    if against is None:
        return _with_writes(told, observed, settings, view, children, served)
    return told if asked.running is None else _with_scale(told, observed, settings, view, children, served)


def _pods(observed: Observed, deployment: Object | None, *, is_canary: bool) -> Pods:
    """The pods of `deployment`, one of the service's two."""
    pods = [pod for pod in observed.pods if (label(pod, TRACK_LABEL) == CANARY_TRACK) is is_canary]
    return pods_of(deployment, pods, observed.warnings, observed.now, observed.provisioning)


def _canary(
    observed: Observed,
    settings: Settings,
    children: Children,
    desired: Intent,
    pods: Pods,
    proven: frozenset[str],
    *,
    is_blocked: bool,
) -> CanaryRollout:
    canary = _pods(observed, children.canary, is_canary=True)
    return canary_rollout(observed, settings, children, desired, canary, pods, proven, is_blocked=is_blocked)


def _with_canary(desired: Intent, children: Children, canary: CanaryRollout) -> Intent:
    """`desired` as `canary` permits it and its pods leave room for it. A rollout that has proved nothing goes back to
    the revision that another candidate is measured against."""
    if canary.holds:
        desired = held(desired, children)
    if canary.holds and desired.held and canary.stable is not None:
        desired = replace(desired, running=canary.stable)
    return replace(desired, surrendered=canary.surrendered, unready_canaries=canary.unready_pods)


def _readable(observed: Observed, children: Children) -> SpeculativeServiceSpec | None:
    """What can be read of a spec that does not fit this release, once a revision runs."""
    running = current_revision(children, stored_revisions(children, observed.replica_sets))
    if running is None:
        return None
    return readable_spec(observed.service.get("spec") or {}, running, stored_hot(children))


def _asked(
    observed: Observed,
    settings: Settings,
    children: Children,
    profiles: Profiles,
    spec: SpeculativeServiceSpec,
    evidence: RolloutEvidence,
) -> Intent:
    """What the spec asks for now: what is refused waits, and what runs goes on at the spec's scale."""
    kept = observed.status.runtime_image
    image = default_image(observed.service, children.deployment, kept, settings, on_cpu=spec.accelerator.on_cpu)
    image = canary_image(children.canary, on_cpu=spec.accelerator.on_cpu) or image
    given = given_image(children.deployment, kept)
    is_legible = not isinstance(observed.parsed, str)
    sets = observed.replica_sets
    asked = intent(children, image, given, sets, profiles, settings, spec, evidence, is_legible=is_legible)
    return held(asked, children) if rollout_refusal(children, asked, observed.rejections) else asked


def _products_with_node(observed: Observed, pods: Pods, spec: SpeculativeServiceSpec) -> frozenset[str]:
    """Looked for only where a rollout may wait for some of several products."""
    products = spec.accelerator.products
    if spec.profiling.mode is not ProfilingMode.REQUIRED or len(products) == 1:
        return frozenset(products)
    return frozenset(name for name in products if has_node(observed.nodes, spec, name, pods.tolerations))


def _names(children: Children, settings: Settings, asked: Intent) -> list[tuple[str, str]]:
    """(kind, name) of what `asked` needs."""
    service = children.owner.name
    policy = [(NETWORK_POLICY, network_policy_name(service))] if settings.admin_port_peers else []
    is_canary = asked.spec.rollout.strategy is RolloutStrategy.DRAFT_CANARY
    canary = canary_names(service) if is_canary else ()
    return [*child_names(service), (CONFIG_MAP, revision_map_name(service, asked.wanted.name)), *policy, *canary]


def _told(observed: Observed, settings: Settings, view: ProfilingView, served: Served, children: Children) -> Plan:
    """What is said of the service, and when to look again."""
    status = _status(observed, settings, served, children)
    return Plan(
        profiles=tuple(profile_name(each.keys.target) for each in served.profiles),
        status=status,
        events=(*events(observed.status, status), *canary_events(observed.status, status, served.canary)),
        requeue_after_s=_next_look_s(settings, view, served.rollout, served.profiles),
    )


def _with_writes(
    told: Plan, observed: Observed, settings: Settings, view: ProfilingView, children: Children, served: Served
) -> Plan:
    """`told`, and what a spec that may be applied makes of the children and Jobs."""
    asked, found = served.rollout.asked, served.profiles
    workloads = _workloads(observed, settings, children, asked, canary_children(children, asked, served.canary))
    maps = plan_profile_maps(view, asked, found)
    shared = plan_shared_profiles(view, settings, asked, found)
    jobs = plan_jobs(view, settings, asked, found, pods_are_placed=pods_are_placed(children, asked))
    marks = _marks(observed, view, children, asked, served.canary)
    waits = (told.requeue_after_s, workloads.requeue_after_s, jobs.requeue_after_s, marks.requeue_after_s)
    return replace(
        told,
        create=(*workloads.create, *maps.create, *shared.create, *jobs.create),
        apply=(*maps.apply, *shared.apply, *workloads.apply),
        adopt=(*workloads.adopt, *maps.adopt, *jobs.adopt),
        annotate=marks.annotate,
        delete=(*workloads.delete, *maps.delete, *shared.delete, *jobs.delete),
        published=frozenset(shared.published),
        shared=frozenset((*maps.stored, *(job.name for job in jobs.delete))),
        requeue_after_s=min((wait for wait in waits if wait is not None), default=None),
    ).without(observed.rejections)


def _with_scale(
    plan: Plan, observed: Observed, settings: Settings, view: ProfilingView, children: Children, served: Served
) -> Plan:
    """`plan`, and what a refused spec asks of the revision that runs: replicas, speculation, SLO classes. Nothing is
    measured and nothing is deleted for it."""
    desired = served.rollout.asked
    canary = Further(revisions=frozenset({revision_in(children.canary)}))
    workloads = _workloads(observed, settings, children, desired, canary)
    marks = _marks(observed, view, children, desired, served.canary)
    waits = (plan.requeue_after_s, workloads.requeue_after_s, marks.requeue_after_s)
    return replace(
        plan,
        create=workloads.create,
        apply=workloads.apply,
        annotate=marks.annotate,
        requeue_after_s=min((wait for wait in waits if wait is not None), default=None),
    ).without(observed.rejections)


def _workloads(
    observed: Observed, settings: Settings, children: Children, desired: Intent, canary: Further
) -> WorkloadPlan:
    in_use = {revision_of(owner) for owner in (*observed.replica_sets, *observed.pods)}
    return plan_workloads(children, desired, in_use, settings.admin_port_peers, canary)


def _marks(
    observed: Observed, view: ProfilingView, children: Children, desired: Intent, canary: CanaryRollout
) -> Refreshes:
    """Annotations of pods: the product that each runs on, and touches for a changed hot config."""
    pods = _pods(observed, children.canary, is_canary=True)
    living = (*view.pods.living, *pods.living)
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
        now=observed.now,
        pods=pods,
        nodes=observed.nodes,
        jobs=observed.jobs,
        job_pods=observed.job_pods,
        sources=sources,
        measured_elsewhere=observed.measured_elsewhere,
        request=annotation(observed.service, REPROFILE_ANNOTATION),
    )


def _status(observed: Observed, settings: Settings, served: Served, children: Children) -> SpeculativeServiceStatus:
    status = _counted(observed, children, served.rollout.pods).model_copy(update=fields(served))
    return with_verdicts(status, verdicts(served, settings.unschedulable_s), observed.generation, observed.now)


def _served(
    observed: Observed,
    children: Children,
    pods: Pods,
    asked: Intent,
    found: list[ProductProfile],
    names: list[tuple[str, str]],
    against: Verdict | None,
    canary: CanaryRollout,
) -> Served:
    """What the status of a service is told from; `names` are (kind, name) of what it needs, and `against` is why that
    must not be applied."""
    states = {name: observed.states[name] for pod in pods.ready if (name := name_of(pod)) in observed.states}
    unheard = why_unheard(observed.unheard, pods.ready, observed.network_policies)
    behaviour = Behaviour(explained(observed.figures, unheard), observed.status, states, is_served=bool(pods.ready))
    rewritten = tuple(each for each in observed.rejections if each.is_stored)
    refused = [each for each in observed.rejections if not each.is_stored]
    serving = [each for each in refused if each.component == SERVING]
    profiling = tuple(each for each in refused if each.component != SERVING)
    rollout = Rollout(
        asked=asked,
        deployment=children.deployment,
        pods=pods,
        refused=against or refusal(serving),
        standing=behaviour.standing_condition(ConditionType.PROGRESSING),
        leaving=children.leaving(names),
        canary=canary,
    )
    return Served(
        rollout=rollout,
        behaviour=behaviour,
        seen=Seen(asked, pods, states, observed.warnings, profiling),
        profiles=found,
        unheard=unheard,
        is_reachable=children.are_reachable,
        rewritten=rewritten,
        canary=canary,
        generation=observed.generation,
    )


def _unread(observed: Observed, children: Children, pods: Pods, why: str) -> Plan:
    """Nothing is applied, and little is known of what was asked for; what answers is still told."""
    replicas, against = _replicas(observed, children), unreadable(why)
    told: Verdicts = {
        **{kind: unknown(Reason.PENDING, "The spec cannot be read; see SpecValid.") for kind in ConditionType},
        ConditionType.SPEC_VALID: against,
        ConditionType.AVAILABLE: available(pods, replicas),
        ConditionType.UPDATED: against,
        ConditionType.READY: endpoint_ready(pods, replicas, is_reachable=children.are_reachable),
    }
    status = with_verdicts(_counted(observed, children, pods), with_kstatus(told), observed.generation, observed.now)
    return Plan(status=status, events=events(observed.status, status))


def _replicas(observed: Observed, children: Children) -> int:
    """How many pods there should be, where the spec cannot be read: as many as before, or at least one."""
    if children.deployment is not None:
        return integer(children.deployment, "spec", "replicas")
    return integer(observed.service, "spec", "replicas") or 1


def _counted(observed: Observed, children: Children, pods: Pods) -> SpeculativeServiceStatus:
    """The status so far, with what can be counted without a spec."""
    deployment = children.deployment or {}
    return observed.status.model_copy(
        update={
            "observed_generation": observed.generation,
            "replicas": integer(deployment, "status", "replicas"),
            "ready_replicas": len(pods.ready),
            "updated_replicas": integer(deployment, "status", "updatedReplicas"),
            "ready_revision": _ready_revision(observed, children, pods),
            "selector": ",".join(f"{name}={value}" for name, value in selector(children.owner.name).items()),
        }
    )


def _ready(pods: Pods) -> frozenset[str]:
    """Revisions of ready pods."""
    return frozenset(revision_of(pod) for pod in pods.ready)


def _ready_revision(observed: Observed, children: Children, pods: Pods) -> str:
    return ready_revision(children, observed.status.ready_revision, _ready(pods))


def _next_look_s(
    settings: Settings, view: ProfilingView, rollout: Rollout, found: list[ProductProfile]
) -> float | None:
    """The nearest moment at which time alone changes a decision."""
    asked = rollout.asked
    running = asked.running.name if asked.running is not None else ""
    aging = [stale_in_s(asked, each.keys, each.store, view.now) for each in found]
    silent = any(is_being_created(pod) for pod in (*view.pods.living, *view.job_pods))
    silent = silent or is_node_awaited(view.pods, seconds(asked.spec.rollout.progress_deadline), running)
    silent = silent or any(each.job_is_active and each.pod is None for each in found)
    moments = [*aging, next_capacity_check_s(view.pods, settings.unschedulable_s, running)]
    moments += [next_deadline_check_s(rollout), LOOK_AGAIN_S if silent else None]
    moments += [rollout.canary.next_look_s if rollout.canary is not None else None]
    return min((moment for moment in moments if moment is not None and moment > 0), default=None)
