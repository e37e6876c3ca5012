"""decide(observed, settings) -> Plan: everything that the operator decides, without any I/O.

`ServiceWorld` indexes what was observed of a service. `Intent` is what should run, and what holds it back. Each concern
turns both into a `ConcernOutcome`: writes, verdicts of conditions, fields of the status, and when to decide again. No
concern reads another one's outcome; what a later decision must know stands in the status or in an annotation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.cluster_model import Observed, OperatorSettings
from outrider_operator.decide.concerns.canary_outcome import canary_events, draft_canary
from outrider_operator.decide.concerns.download_outcome import download
from outrider_operator.decide.concerns.existing_workload import existing_workload
from outrider_operator.decide.concerns.figures_outcome import figures, figures_of
from outrider_operator.decide.concerns.gateway_outcome import gateway
from outrider_operator.decide.concerns.profile_outcome import profile
from outrider_operator.decide.concerns.specification_outcome import specification
from outrider_operator.decide.concerns.workload_outcome import pod_notes, without_spec, workload
from outrider_operator.decide.desired.desired_state import DesiredState, desired_state
from outrider_operator.decide.desired.profile_store import Profiles
from outrider_operator.decide.desired.revisions import unread_canary_maps, unread_map, unread_maps
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.intent import Intent, intent_of
from outrider_operator.decide.outcome import ConcernOutcome, merge
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profiling.known_profiles import Sources, sources_of, unread_sources
from outrider_operator.decide.status_changes import events, with_kstatus, with_verdicts
from outrider_operator.decide.workloads.children import write_children
from outrider_operator.plan import Plan
from outrider_operator.validation.reading import is_being_deleted

__all__ = ["decide"]

Concern = Callable[[ServiceWorld, Intent], ConcernOutcome]

CONCERNS: tuple[Concern, ...] = (
    specification,
    profile,
    download,
    workload,
    draft_canary,
    gateway,
    pod_notes,
    figures,
)


def decide(observed: Observed, settings: OperatorSettings) -> Plan:
    """Plan the next step that brings the cluster nearer to the service's spec. Never raises on odd input."""
    if is_being_deleted(observed.service):  # garbage collection takes the children
        return Plan(status=observed.status)
    world = ServiceWorld(observed, settings)
    if unread := unread_maps(world.children, observed.replica_sets):
        return Plan(status=observed.status, read=tuple(unread))
    if world.spec is None:
        status = _status(world, without_spec(world))
        return Plan(status=status, events=events(observed.status, status))
    if (workload := world.spec.workload) is not None:
        outcome = merge([existing_workload(world, world.spec, workload.existing), figures_of(world, world.spec, [])])
        return _plan(world, write_children(world.children, outcome))
    desired = desired_state(world, world.spec)
    sources = sources_of(world.profiles, Profiles(observed.shared_profiles), settings, desired)
    own, shared = _unread_contents(world, desired, sources)
    if own or shared:
        return Plan(status=observed.status, read=own, read_shared=shared)
    intent = intent_of(world, desired, sources)
    outcome = merge([concern(world, intent) for concern in CONCERNS])
    return _plan(world, write_children(world.children, outcome), intent)


def _plan(world: ServiceWorld, outcome: ConcernOutcome, intent: Intent | None = None) -> Plan:
    """The plan for `outcome`. Nothing is deleted or adopted for a refused spec. intent: None for pods of others."""
    before, status = world.observed.status, _status(world, outcome)
    profiles, canary = (intent.profiles, canary_events(before, status, intent.canary)) if intent else ([], ())
    plan = Plan(
        create=outcome.create,
        apply=outcome.apply,
        adopt=outcome.adopt,
        annotate=outcome.annotate,
        delete=outcome.delete,
        profiles=tuple(profile_name(profile.keys.target) for profile in profiles),
        shared=outcome.stored,
        published=outcome.published,
        status=status,
        events=(*events(before, status), *canary),
        requeue_after_s=outcome.wake_after_s,
    ).without(world.observed.refusals)
    return plan if intent is None or intent.problem is None else replace(plan, adopt=(), delete=())


def _status(world: ServiceWorld, outcome: ConcernOutcome) -> SpeculativeServiceStatus:
    """The last status with the fields and conditions of `outcome`."""
    status = world.observed.status.model_copy(update=dict(outcome.status))
    return with_verdicts(status, with_kstatus(dict(outcome.conditions)), world.observed.generation, world.at)


def _unread_contents(
    world: ServiceWorld, desired: DesiredState, sources: Sources
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of ConfigMaps in the service's namespace and in the operator's whose contents were not read yet.

    The cache keeps ConfigMaps without their data.
    """
    children, revision = world.children, desired.spec_revision
    there = world.profiles.documents
    names = (profile_name(keys.target) for keys in revision.keys)
    profiles = [name for name in names if name in there and "data" not in there[name]]
    own = (*unread_map(children, revision), *profiles, *unread_canary_maps(children, revision.name))
    return (own, ()) if own else unread_sources(sources, desired)
