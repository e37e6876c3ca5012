"""The intent for a service: what should run, what holds it back, and what is known of its profiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider_crds.rollout_settings import RolloutStrategy
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator import cluster_model
from outrider_operator.decide.canary.draft_canary import CanaryRollout, canary_rollout
from outrider_operator.decide.desired.desired_state import DesiredState, keep_current
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.model_download import Prefetch, prefetch_of
from outrider_operator.decide.outcome import Verdict
from outrider_operator.decide.profiling.known_profiles import Sources
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView, product_profiles
from outrider_operator.decide.specification import no_groups, no_names, spec_problem, unreadable_spec
from outrider_operator.decide.workloads.children import network_policy_name, rollout_refusal


@dataclass(frozen=True)
class Intent:
    desired: DesiredState
    problem: Verdict | None
    """Why the spec must not be applied. The pods serve on, at its scale."""
    prefetch: Prefetch | None
    canary: CanaryRollout
    view: ProfilingView
    profiles: list[ProductProfile]
    names: list[tuple[str, str]]
    """(kind, name) of the objects that the spec needs."""

    @property
    def spec(self) -> SpeculativeServiceSpec:
        return self.desired.spec

    @property
    def scales(self) -> bool:
        """May replicas and hot config be written? Those of a refused spec may, if a revision runs."""
        return self.problem is None or self.desired.running is not None


def intent_of(world: ServiceWorld, desired: DesiredState, sources: Sources) -> Intent:
    """The intent for `desired`, whose revision may have to wait for its models or for a canary's verdict."""
    children, observed = world.children, world.observed
    if rollout_refusal(children, desired, observed.refusals):
        desired = keep_current(desired, children)
    names = _names(world, desired)
    problem = _problem(world, desired.spec, names)
    prefetch = prefetch_of(world, desired)
    is_blocked = problem is not None or (prefetch is not None and prefetch.holds)
    if is_blocked:
        desired = keep_current(desired, children)  # the pods serve on, and the status reports them
    canary = canary_rollout(world, desired, is_blocked=is_blocked)
    desired = _with_canary(world, desired, canary)
    view = ProfilingView(world, desired, sources)
    return Intent(desired, problem, prefetch, canary, view, product_profiles(view), names)


def _problem(world: ServiceWorld, spec: SpeculativeServiceSpec, names: list[tuple[str, str]]) -> Verdict | None:
    if world.unreadable_reason:
        problem: Verdict | None = unreadable_spec(world.unreadable_reason)
    else:
        problem = spec_problem(spec, world.settings, world.children, names)
    return problem or no_groups(spec, world.observed.groups_access) or no_names(spec, world.children)


def _with_canary(world: ServiceWorld, desired: DesiredState, canary: CanaryRollout) -> DesiredState:
    """Hold the spec's revision back while `canary` measures it, and give up the pods that the canary needs.

    A rollout whose revision never had a ready pod returns to the revision that the candidate is measured against.
    """
    if canary.holds:
        desired = keep_current(desired, world.children)
    if canary.holds and desired.is_waiting and canary.stable is not None:
        desired = replace(desired, running=canary.stable)
    return replace(desired, surrendered=canary.surrendered, unready_canaries=canary.unready_pods)


def _names(world: ServiceWorld, desired: DesiredState) -> list[tuple[str, str]]:
    service = world.children.owner.name
    policy = [(cluster_model.NETWORK_POLICY, network_policy_name(service))] if world.settings.admin_port_peers else []
    is_canary = desired.spec.rollout.strategy is RolloutStrategy.DRAFT_CANARY
    named_account = {"serviceAccountName", "serviceAccount"} & set(desired.spec.pod_template.others)
    return [
        *(
            key
            for key in cluster_model.child_names(service)
            if not (named_account and key[0] == cluster_model.SERVICE_ACCOUNT)
        ),
        (cluster_model.CONFIG_MAP, cluster_model.revision_map_name(service, desired.spec_revision.name)),
        *policy,
        *(cluster_model.canary_names(service) if is_canary else ()),
        *(cluster_model.groups_names(service, has_policy=bool(policy)) if desired.spec.engine.nodes > 1 else ()),
    ]
