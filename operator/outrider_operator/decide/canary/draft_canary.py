"""The draft canary of a service in one reconcile: its last state, its next state, and its pods.

A decision is written into the status first and carried out by the next reconcile, so an operator that is killed
in between loses nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from outrider_crds.base import seconds
from outrider_crds.rollout_settings import RolloutStrategy
from outrider_crds.runtime_config import PRODUCT_ANNOTATION, HotConfig, config_hash, hot_config
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import RolloutStatus

from outrider_operator.cluster_model import (
    ApiRefusal,
    Object,
    Observed,
    OperatorSettings,
    canary_names,
    revision_map_name,
)
from outrider_operator.decide.canary.machine import (
    Canary,
    CanaryPhase,
    CanarySettings,
    CanaryStep,
    CanaryView,
    Orders,
    needs_canary,
    step,
)
from outrider_operator.decide.canary.pools import Pools, pools_differ, pools_of
from outrider_operator.decide.canary.record import canary_of, recorded
from outrider_operator.decide.canary.sight import CanarySight, canary_pods, restarts_since
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pod_states import LOOK_AGAIN_S, Pods, revision_of
from outrider_operator.decide.revisions import (
    Revision,
    canary_revision,
    canary_revision_name,
    current_revision,
    current_revision_name,
    revision_in,
    stored_canary,
)
from outrider_operator.validation.reading import annotation, condition_of, integer

PROMOTE_ANNOTATION, ABORT_ANNOTATION = "outrider.dev/promote", "outrider.dev/abort"
RETRY_ANNOTATION = "outrider.dev/retry"


@dataclass(frozen=True)
class CanaryRollout:
    before: Canary | None
    """Canary in the last status, which is carried out now."""
    decided: CanaryStep
    """Canary for the next status."""
    status: RolloutStatus | None
    """The status, or the record on the canary's Deployment where that has no canary."""
    holds: bool
    """True if the spec's revision must not replace the stable pods yet."""
    spec: SpeculativeServiceSpec
    settings: CanarySettings
    at: float
    """Unix seconds."""
    orders: Orders
    revision: Revision | None = None
    """Revision of the canary's Deployment, which stays without pods to record a verdict; None without one."""
    has_pods: bool = False
    is_stored: bool = False
    """Is its ConfigMap there, and were pods made of it?"""
    hot: HotConfig | None = None
    """Hot config for the canary's pods."""
    hold: str = ""
    """Why the pools cannot be compared now, in a sentence; else empty."""
    waits_for_profile: bool = False
    """Does the candidate wait for its profile (profiling.mode is Required)?"""
    has_pods_left: bool = False
    """Is any pod of the canary there?"""
    ready_pods: int = 0
    """Ready pods of the canary."""
    serving_pods: int = 0
    """Ready pods of the Deployment."""
    waiting_image: str = ""
    """Runtime image that the service moves to after the canary; empty without one."""
    is_frozen: bool = False
    """Leave the canary's objects as they are."""
    stable: Revision | None = None
    """Revision for the Deployment while the candidate is held; None: the current one."""

    @property
    def canary(self) -> Canary | None:
        """The canary that conditions and status report: the current one, else the last one."""
        return self.decided.canary or self.decided.ended or self.before

    @property
    def unknown_orders(self) -> tuple[str, ...]:
        """Annotations that name no revision, each with its value ("promote=8a1e43c8ca")."""
        return tuple(f"{name}={self.orders.by_name[name]}" for name in self.decided.unknown_orders)

    @property
    def is_changed(self) -> bool:
        """True if the status must be written before anything else is done."""
        before, after = self.before, self.canary
        return _identity(before) != _identity(after)

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
        return max(0, self.replicas - self.ready_pods) if self.has_pods_left else 0

    @property
    def next_look_s(self) -> float | None:
        """Seconds until time alone changes the canary."""
        if self.is_changed:
            return 0.05
        if self.canary is None or self.canary.phase not in (CanaryPhase.STARTING, CanaryPhase.MEASURING):
            return None
        if self.canary.held_since:  # a pod may be ready and not answer, which is an error if it lasts
            is_awaited = self.ready_pods > 0 and not (self.hold or self.spec.paused)
            return LOOK_AGAIN_S if is_awaited else None
        remaining_s = self.settings.timeout_s - self.canary.measured_s(self.at)
        return remaining_s if remaining_s > 0 else None


def canary_rollout(
    observed: Observed,
    settings: OperatorSettings,
    children: Children,
    desired: DesiredState,
    pods: Pods,
    serving: Pods,
    proven: frozenset[str],
    *,
    is_blocked: bool,
) -> CanaryRollout:
    """pods: the canary's. serving: the others. proven: revisions that have had a ready pod. is_blocked: the spec must
    not be applied now, so nothing is decided."""
    stable = _serving_revision(children, desired, serving, proven)
    pools = pools_of(stable.boot.draft_pool if stable is not None else [], desired.spec_revision.boot.draft_pool)
    pools = replace(pools, lost_revision=_lost_revision(children, desired, stable, proven))
    view = _view(observed, children, desired, stable, proven, is_blocked=is_blocked)
    sick = serving.sickness() if not any(serving.is_well(pod) for pod in pods.ready) else None
    trouble = f"{sick.message.rstrip('.')}." if sick is not None else ""
    view = replace(view, hold=pools.hold(desired.spec), baseline_trouble=trouble)
    if pools.lost_revision:
        view = replace(view, stable=pools.lost_revision, pool_differs=True)
    rollout = _remembered(observed, children, desired, view, is_blocked=is_blocked)
    rollout = replace(rollout, ready_pods=len(pods.ready), serving_pods=len(serving.ready))
    before = rollout.before
    if is_blocked and before is not None:
        return replace(rollout, decided=CanaryStep(before.with_pause(view.at)))
    current = before if _is_of_spec(before, view) else None
    has_pods = current is not None and current.has_pods(view.settings.on_inconclusive)
    is_kept = bool(pools.lost_revision) and has_pods and desired.spec.replicas > 0
    if current is not None:
        products = _measured_products(observed, children, desired, serving)
        stored = _stored(observed, children, desired, pools, len(products))
        revision = stored or _made(settings, children, desired, products, pools)
        rollout = replace(rollout, is_stored=stored is not None, revision=revision)
        rollout = replace(rollout, hot=_hot(rollout, pools, current), has_pods=has_pods)
    sight = _sight(observed, settings, rollout, pools, pods, children)
    if before is not None:
        sight = replace(sight, stable_restarts=restarts_since(serving, before.started_at))
    is_kept = is_kept or _is_only_endpoint(rollout, children, pods, serving)
    decided = step(before, replace(view, pods=canary_pods(sight, current)))
    return replace(
        rollout,
        decided=decided,
        holds=rollout.holds or (decided.canary is not None and decided.canary.holds_rollout),
        is_frozen=is_kept or _is_frozen(before, decided),
        stable=stable if not is_blocked and view.stable and not _is_foreign(before) else None,
        has_pods_left=bool(pods.living),
    )


def _view(
    observed: Observed,
    children: Children,
    desired: DesiredState,
    stable: Revision | None,
    proven: frozenset[str],
    *,
    is_blocked: bool,
) -> CanaryView:
    """Input of the state machine, without the canary's pods. stable: the revision that serves."""
    spec, pool = desired.spec, desired.spec_revision.boot.draft_pool
    differs = pools_differ(stable.boot.draft_pool if stable is not None else [], pool)
    return CanaryView(
        at=math.floor(observed.at),
        stable=stable.name if stable is not None and _is_stable(stable, desired, proven) else "",
        candidate=desired.spec_revision.name,
        pool_differs=differs and desired.spec_revision.name not in desired.gate.passed,
        is_canary=spec.rollout.strategy is RolloutStrategy.DRAFT_CANARY,
        is_paused=is_blocked or spec.paused or spec.replicas == 0 or desired.is_waiting,
        is_rolled_out=is_rolled_out(children.deployment, desired.spec_revision.name),
        orders=_orders(observed.service),
        settings=_settings(spec),
    )


def _remembered(
    observed: Observed, children: Children, desired: DesiredState, view: CanaryView, *, is_blocked: bool
) -> CanaryRollout:
    """The canary in the last status, before this reconcile decides anything."""
    status = recorded(observed.status.rollout, children.canary, observed.at)
    before = canary_of(status)
    return CanaryRollout(
        before,
        CanaryStep(before),
        status,
        _holds(before, view),
        desired.spec,
        view.settings,
        observed.at,
        view.orders,
        hold=view.hold,
        waits_for_profile=desired.is_waiting and not is_blocked,
        is_frozen=True,
        waiting_image="" if desired.spec.pod_template.image else desired.images.waiting,
    )


def _sight(
    observed: Observed,
    settings: OperatorSettings,
    rollout: CanaryRollout,
    pools: Pools,
    pods: Pods,
    children: Children,
) -> CanarySight:
    revision, deployment = rollout.revision, children.canary or {}
    return CanarySight(
        spec=rollout.spec,
        pools=pools,
        revision=revision.name if revision is not None else "",
        pods=pods,
        states=observed.states,
        unreachable=observed.unreachable,
        refusal=_refusal(observed.refusals, children.owner.name, revision),
        products=frozenset(revision.boot.accelerator.products) if revision is not None else frozenset(),
        hot_hash=config_hash(rollout.hot) if rollout.hot is not None else "",
        unschedulable_s=settings.no_capacity_after_s,
        most_tokens=1 + (revision.boot.max_draft_tokens if revision is not None else 0),
        is_late=condition_of(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded",
    )


def _is_only_endpoint(rollout: CanaryRollout, children: Children, pods: Pods, serving: Pods) -> bool:
    """Would the service lose its only ready pods if the canary's were taken away or replaced now?"""
    if serving.ready or not pods.ready or not rollout.spec.replicas:
        return False
    revision = rollout.revision.name if rollout.revision is not None else ""
    return not rollout.has_pods or revision != revision_in(children.canary)


def _serving_revision(
    children: Children, desired: DesiredState, serving: Pods, proven: frozenset[str]
) -> Revision | None:
    """The revision that a candidate is measured against: the Deployment's. While that one's rollout has proved nothing
    and another revision is wanted, it is the one before it, which has pods and goes on serving."""
    current = current_revision(children, desired.stored)
    name = current_revision_name(children)
    if name in ("", desired.spec_revision.name) or (name in proven and current is None):
        return current
    if current is not None and _is_stable(current, desired, proven):
        return current
    ready = Counter(revision_of(pod) for pod in serving.ready)
    others = [revision for revision in desired.stored if revision.name in desired.gate.passed & proven - {name}]
    return max(others, key=lambda revision: (ready[revision.name], revision.name), default=current)


def _lost_revision(children: Children, desired: DesiredState, stable: Revision | None, proven: frozenset[str]) -> str:
    """The revision that the pods run, where its ConfigMap is gone and the spec, which wants another, cannot make it
    again; else empty."""
    name = current_revision_name(children)
    return name if stable is None and name in proven and name != desired.spec_revision.name else ""


def _is_stable(revision: Revision, desired: DesiredState, proven: frozenset[str]) -> bool:
    """Can another be measured against `revision`? One that never served, or lacks a drafter at a closed gate, is to be
    corrected at once."""
    return revision.name in proven and not desired.gate.is_closed(revision)


def is_rolled_out(deployment: Object | None, revision: str) -> bool:
    """Has the Deployment replaced every pod by one of `revision` that is available?"""
    if deployment is None or revision_in(deployment) != revision:
        return False
    if integer(deployment, "status", "observedGeneration") < integer(deployment, "metadata", "generation"):
        return False
    replicas = integer(deployment, "spec", "replicas")
    counts = [integer(deployment, "status", name) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return counts == [replicas] * 3


def _identity(canary: Canary | None) -> tuple[str, str, str, float] | None:
    return None if canary is None else (canary.phase, canary.candidate, canary.stable, canary.started_at)


def _holds(before: Canary | None, view: CanaryView) -> bool:
    """Does what is remembered keep the candidate away? One that needs a canary and has none yet waits for it."""
    if before is None or not view.is_canary:
        return needs_canary(before, view)
    if before.phase not in list(CanaryPhase):
        return True
    is_another = before.candidate != view.candidate or before.phase in _LEFT
    return needs_canary(before, view) if is_another else before.holds_rollout


_LEFT = (CanaryPhase.SUPERSEDED, CanaryPhase.CANCELLED, CanaryPhase.SUCCESSFUL)


def _is_of_spec(before: Canary | None, view: CanaryView) -> bool:
    """Is `before` the canary of the spec, which is not over and done with?"""
    if before is None or not view.is_canary or before.candidate != view.candidate:
        return False
    return before.phase not in _LEFT


def _is_frozen(before: Canary | None, decided: CanaryStep) -> bool:
    """True if the canary's objects must not change: a newer release wrote it, or its end is not in the status yet."""
    return _is_foreign(before) or _identity(before) != _identity(decided.canary or decided.ended or before)


def _is_foreign(before: Canary | None) -> bool:
    """Was `before` written by a newer release?"""
    return before is not None and before.phase not in list(CanaryPhase)


def _settings(spec: SpeculativeServiceSpec) -> CanarySettings:
    canary = spec.rollout.canary
    return CanarySettings(
        least_gain=canary.least_gain_percent / 100.0,
        min_requests=canary.min_requests,
        timeout_s=seconds(canary.timeout),
        on_inconclusive=canary.on_inconclusive,
        candidate_percent=canary.candidate_percent,
    )


def _orders(service: Object) -> Orders:
    return Orders(
        promote=annotation(service, PROMOTE_ANNOTATION),
        abort=annotation(service, ABORT_ANNOTATION),
        retry=annotation(service, RETRY_ANNOTATION),
    )


def _refusal(refusals: Iterable[ApiRefusal], service: str, revision: Revision | None) -> str:
    """The API server's sentence about an object that the canary's pods need; empty where it took all."""
    names = {name for _, name in canary_names(service)}
    if revision is not None:
        names.add(revision_map_name(service, revision.name))
    refused = (refusal for refusal in refusals if refusal.name in names and not refusal.is_stored)
    first = next(refused, None)
    return f"The API server refuses {first.kind} {first.name}: {first.message}" if first is not None else ""


def _measured_products(observed: Observed, children: Children, desired: DesiredState, serving: Pods) -> list[str]:
    """Products that the canary has a pod of: those in use, and those in use before while this canary ran."""
    products = desired.spec.accelerator.products
    running = stored_canary(children, observed.replica_sets, revision_in(children.canary))
    is_same = running is not None and running.inputs == desired.spec_revision.inputs
    measured = set(running.boot.accelerator.products) if running is not None and is_same else set()
    used = {annotation(pod, PRODUCT_ANNOTATION) for pod in serving.ready} | measured
    return [name for name in products if name in used] or products[:1]


def _stored(
    observed: Observed, children: Children, desired: DesiredState, pools: Pools, products: int
) -> Revision | None:
    """The revision that the canary's pods run, while it hosts both pools on this number of products."""
    name = canary_revision_name(desired.spec_revision.name, products)
    stored = stored_canary(children, observed.replica_sets, name)
    hosted = {drafter.name for drafter in stored.boot.draft_pool} if stored is not None else set()
    return stored if hosted >= {*pools.stable, *pools.candidate} else None


def _made(
    settings: OperatorSettings, children: Children, desired: DesiredState, products: list[str], pools: Pools
) -> Revision | None:
    """The revision of the canary's pods on these products; None if no pod can host both pools."""
    if pools.problem:
        return None
    accelerator = desired.spec.accelerator.model_copy(update={"products": products})
    both = desired.spec.model_copy(update={"draft_pool": list(pools.hosted), "accelerator": accelerator})
    return canary_revision(children.owner, settings, both, desired.image, desired.spec_revision)


def _hot(rollout: CanaryRollout, pools: Pools, canary: Canary) -> HotConfig | None:
    """Hot config for the canary's pods; None if it must not change."""
    if rollout.revision is None or pools.lost_revision:
        return None
    spec = rollout.spec
    paused = {drafter.name for drafter in spec.draft_pool if drafter.paused}
    hosted = [drafter.model_copy(update={"paused": drafter.name in paused}) for drafter in pools.hosted]
    both = spec.model_copy(update={"draft_pool": hosted})
    config = pools.config(canary.attempt, canary.candidate_percent)
    return hot_config(both, [rollout.revision.boot.draft_pool]).model_copy(update={"canary": config})
