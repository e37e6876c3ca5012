"""The draft canary of a service in one reconcile: its last state, its next state, and its pods.

A canary is one more revision with its own replica count. A decision is written into the status first and carried out
by the next reconcile, so an operator that is killed in between loses nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TypeGuard

from outrider_crds.base import seconds
from outrider_crds.rollout_settings import RolloutStrategy
from outrider_crds.rollout_status import RolloutStatus
from outrider_crds.runtime_config import PRODUCT_ANNOTATION, HotConfig, config_hash, hot_config
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import Object
from outrider_operator.decide.canary.machine import CanaryPods, CanaryStep, CanaryView, needs_canary, step
from outrider_operator.decide.canary.pools import Pools, pools_of
from outrider_operator.decide.canary.record import (
    LEFT,
    LOOK_EVERY_S,
    OPEN,
    CanaryPhase,
    attempt_of,
    has_pods,
    is_foreign,
    keeps_away,
    measured_s,
    recorded,
    with_clock,
)
from outrider_operator.decide.canary.sight import CanarySight, canary_pods, engine_restarts
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.desired.revisions import (
    Revision,
    canary_revision_name,
    current_revision,
    current_revision_name,
    revision_in,
    stored_canary,
)
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.desired.wanted_revision import canary_revision
from outrider_operator.decide.pods.pod_states import LOOK_AGAIN_S, revision_of
from outrider_operator.validation.reading import annotation, integer

_ORDERS = ("promote", "abort", "retry")
"""Orders by an annotation of the service: outrider.dev/promote and so on."""
_AT_ONCE_S = 0.05


@dataclass(frozen=True)
class CanaryRollout:
    world: ServiceWorld
    desired: DesiredState
    view: CanaryView
    pools: Pools
    before: RolloutStatus | None
    """Canary in the last status, which is carried out now."""
    decided: CanaryStep
    """Canary for the next status."""
    waits_for_profile: bool = False
    """Does the candidate wait for its profile (profiling.mode is Required)?"""
    revision: Revision | None = None
    """Revision of the canary's Deployment, which stays without pods to record a verdict; None without one."""
    is_stored: bool = False
    """Is its ConfigMap there, and were pods made of it?"""
    is_frozen: bool = True
    """Leave the canary's objects as they are."""
    stable: Revision | None = None
    """Revision for the Deployment while the candidate is held; None: the current one."""

    @property
    def spec(self) -> SpeculativeServiceSpec:
        return self.desired.spec

    @property
    def canary(self) -> RolloutStatus | None:
        """The canary that conditions and status report: the current one, else the last one."""
        return self.decided.canary or self.decided.ended or self.before

    @property
    def current(self) -> RolloutStatus | None:
        """The canary of the spec in the last status, unless it is over and done with."""
        return self.before if _is_of_spec(self.before, self.view) else None

    @property
    def has_pods(self) -> bool:
        return self.current is not None and has_pods(self.current, self.view.settings)

    @property
    def holds(self) -> bool:
        """Must the spec's revision not replace the stable pods yet? What was remembered holds until the end of it
        stands in the status, and one that needs a canary and has none yet waits for it."""
        if is_foreign(self.before) and self.view.is_canary:
            return True
        canaries = [canary for canary in (self.before, self.decided.canary) if _is_of_spec(canary, self.view)]
        return any(map(keeps_away, canaries)) if canaries else needs_canary(self.before, self.view)

    @property
    def is_changed(self) -> bool:
        """Must the status be written before anything else is done?"""
        return _identity(self.before) != _identity(self.canary)

    @property
    def hot(self) -> HotConfig | None:
        """Hot config for the canary's pods; None if it must not change."""
        canary, spec = self.current, self.spec
        if canary is None or self.revision is None or self.pools.lost_revision:
            return None
        paused = {drafter.name for drafter in spec.draft_pool if drafter.paused}
        hosted = [drafter.model_copy(update={"paused": drafter.name in paused}) for drafter in self.pools.hosted]
        both = spec.model_copy(update={"draft_pool": hosted})
        config = self.pools.config(attempt_of(canary), canary.candidate_percent)
        return hot_config(both, [self.revision.boot.draft_pool]).model_copy(update={"canary": config})

    @property
    def replicas(self) -> int:
        """Pods of the canary, of all products."""
        if self.revision is None or not (self.has_pods and self.spec.replicas):
            return 0
        is_spread = "topologySpreadConstraints" in self.revision.template["spec"]
        products = len(self.revision.boot.accelerator.products) if is_spread else 1
        return self.spec.rollout.canary.pods * products

    @property
    def surrendered(self) -> int:
        """Pods of the Deployment that make room for the canary's if none may be added. The last pod always stays."""
        rollout = self.spec.rollout
        room = min(rollout.max_unavailable, self.replicas) if rollout.max_surge == 0 else 0
        return max(0, min(room, self.spec.replicas - 1))

    @property
    def unready_pods(self) -> int:
        """Pods that a disruption budget counts as unavailable: none before the first is made."""
        pods = self.world.canary_pods
        return max(0, self.replicas - len(pods.ready)) if pods.living else 0

    @property
    def next_look_s(self) -> float | None:
        """Seconds until time alone changes the canary."""
        canary = self.canary
        if self.is_changed:
            return _AT_ONCE_S
        if canary is None or canary.phase not in (CanaryPhase.STARTING, CanaryPhase.MEASURING):
            return None
        if canary.held_since:  # a pod may be ready and not answer, which is an error if it lasts
            is_awaited = self.world.canary_pods.ready and not (self.view.hold or self.spec.paused)
            return LOOK_AGAIN_S if is_awaited else None
        remaining_s = seconds(self.view.settings.timeout) - measured_s(canary, self.world.at)
        return min(remaining_s, LOOK_EVERY_S) if remaining_s > 0 else None


def canary_rollout(world: ServiceWorld, desired: DesiredState, *, is_blocked: bool) -> CanaryRollout:
    """is_blocked: the spec must not be applied now, so nothing is decided."""
    stable = _serving_revision(world, desired)
    pools = pools_of(stable.boot.draft_pool if stable is not None else [], desired.spec_revision.boot.draft_pool)
    pools = replace(pools, lost_revision=_lost_revision(world, desired, stable))
    view = _view(world, desired, stable, pools, is_blocked=is_blocked)
    before = recorded(world.observed.status.rollout, world.children.canary, world.at)
    waits = desired.is_waiting and not is_blocked
    rollout = CanaryRollout(world, desired, view, pools, before, CanaryStep(before), waits)
    if is_blocked and before is not None:
        is_open = before.phase in OPEN
        return replace(rollout, decided=CanaryStep(with_clock(before, view.at, runs=False) if is_open else before))
    pods = CanaryPods()
    if (current := rollout.current) is not None:
        revision, is_stored = _hosting(world, desired, pools)
        rollout = replace(rollout, revision=revision, is_stored=is_stored)
        hot_hash = config_hash(rollout.hot) if rollout.hot is not None else ""
        pods = canary_pods(CanarySight(world, desired.spec, current, pools, revision, hot_hash))
    decided = replace(rollout, decided=step(before, replace(view, pods=pods)))
    is_serving = not is_blocked and bool(view.stable) and not is_foreign(before)
    return replace(decided, is_frozen=_is_frozen(decided), stable=stable if is_serving else None)


def _view(
    world: ServiceWorld, desired: DesiredState, stable: Revision | None, pools: Pools, *, is_blocked: bool
) -> CanaryView:
    """Input of the state machine, without the canary's pods. stable: the revision that serves."""
    spec, candidate, lost = desired.spec, desired.spec_revision, pools.lost_revision
    is_canary = spec.rollout.strategy is RolloutStrategy.DRAFT_CANARY
    return CanaryView(
        at=math.floor(world.at),
        stable=lost or (stable.name if stable is not None and _is_stable(world, desired, stable) else ""),
        candidate=candidate.name,
        pool_differs=bool(lost) or (pools.differ and candidate.name not in desired.gate.passed),
        is_canary=is_canary,
        is_paused=is_blocked or spec.paused or spec.replicas == 0 or desired.is_waiting,
        hold=pools.hold(spec),
        baseline_trouble=_baseline_trouble(world),
        is_rolled_out=is_rolled_out(world.children.deployment, candidate.name),
        restarts=engine_restarts(world.pods) if is_canary else {},
        orders={name: said for name in _ORDERS if (said := annotation(world.observed.service, f"outrider.dev/{name}"))},
        settings=spec.rollout.canary,
    )


def _baseline_trouble(world: ServiceWorld) -> str:
    """Why no pod that serves is well, in a sentence; empty while one is, or a pod that hosts both pools."""
    trouble = world.pods.sickness()
    if trouble is None or any(map(world.canary_pods.is_well, world.canary_pods.ready)):
        return ""
    return f"{trouble.message.rstrip('.')}."


def _serving_revision(world: ServiceWorld, desired: DesiredState) -> Revision | None:
    """The revision that a candidate is measured against: the Deployment's. While that one's rollout has proved nothing
    and another revision is wanted, it is the one before it, which has pods and goes on serving."""
    current, name = current_revision(world.children, desired.stored), current_revision_name(world.children)
    if name in ("", desired.spec_revision.name) or (name in world.proven and current is None):
        return current
    if current is not None and _is_stable(world, desired, current):
        return current
    ready = Counter(revision_of(pod) for pod in world.pods.ready)
    others = [revision for revision in desired.stored if revision.name in desired.gate.passed & world.proven - {name}]
    return max(others, key=lambda revision: (ready[revision.name], revision.name), default=current)


def _lost_revision(world: ServiceWorld, desired: DesiredState, stable: Revision | None) -> str:
    """The revision that the pods run, where its ConfigMap is gone and the spec, which wants another, cannot make it
    again; else empty."""
    name = current_revision_name(world.children)
    return name if stable is None and name in world.proven and name != desired.spec_revision.name else ""


def _is_stable(world: ServiceWorld, desired: DesiredState, revision: Revision) -> bool:
    """Can another be measured against `revision`? One that never served, or lacks a drafter at a closed gate, is to be
    corrected at once."""
    return revision.name in world.proven and not desired.gate.is_closed(revision)


def is_rolled_out(deployment: Object | None, revision: str) -> bool:
    """Has the Deployment replaced every pod by one of `revision` that is available?"""
    if deployment is None or revision_in(deployment) != revision:
        return False
    if integer(deployment, "status", "observedGeneration") < integer(deployment, "metadata", "generation"):
        return False
    replicas = integer(deployment, "spec", "replicas")
    counts = [integer(deployment, "status", name) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return counts == [replicas] * 3


def _identity(canary: RolloutStatus | None) -> tuple[str, str, str, str] | None:
    return None if canary is None else (canary.phase, canary.candidate, canary.stable, canary.started_at)


def _is_of_spec(canary: RolloutStatus | None, view: CanaryView) -> TypeGuard[RolloutStatus]:
    """Is `canary` that of the spec, and not over and done with?"""
    if canary is None or not view.is_canary or canary.candidate != view.candidate:
        return False
    return canary.phase not in LEFT


def _is_frozen(rollout: CanaryRollout) -> bool:
    """Must the canary's objects not change? A newer release wrote it, its end is not in the status yet, what it is
    measured against is lost, or its pods are the only ready ones and would be taken away or replaced."""
    if is_foreign(rollout.before) or rollout.is_changed:
        return True
    if not rollout.spec.replicas:
        return False
    if rollout.has_pods and rollout.pools.lost_revision:
        return True
    is_same = rollout.revision is not None and rollout.revision.name == revision_in(rollout.world.children.canary)
    is_only_endpoint = rollout.world.canary_pods.ready and not rollout.world.pods.ready
    return bool(is_only_endpoint) and not (rollout.has_pods and is_same)


def _hosting(world: ServiceWorld, desired: DesiredState, pools: Pools) -> tuple[Revision | None, bool]:
    """The revision of the pods that host both pools, None if none can; and whether it is stored."""
    products = _measured_products(world, desired)
    name = canary_revision_name(desired.spec_revision.name, len(products))
    stored = stored_canary(world.children, world.observed.replica_sets, name)
    if stored is not None and {drafter.name for drafter in stored.boot.draft_pool} >= {*pools.stable, *pools.candidate}:
        return stored, True
    if pools.problem:
        return None, False
    accelerator = desired.spec.accelerator.model_copy(update={"products": products})
    both = desired.spec.model_copy(update={"draft_pool": list(pools.hosted), "accelerator": accelerator})
    owner = world.children.owner
    return canary_revision(owner, world.settings, both, desired.image, desired.spec_revision), False


def _measured_products(world: ServiceWorld, desired: DesiredState) -> list[str]:
    """Products that the canary has a pod of: those in use, and those in use before while this canary ran."""
    products, children = desired.spec.accelerator.products, world.children
    running = stored_canary(children, world.observed.replica_sets, revision_in(children.canary))
    is_same = running is not None and running.inputs == desired.spec_revision.inputs
    measured = set(running.boot.accelerator.products) if running is not None and is_same else set()
    used = {annotation(pod, PRODUCT_ANNOTATION) for pod in world.pods.ready} | measured
    return [name for name in products if name in used] or products[:1]
