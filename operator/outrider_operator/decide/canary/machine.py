"""The state machine of a canary: a pure step from the last status and the observed pods to the next status.

It has no timers: every decision depends on times in the status, so an operator that was killed continues where it
stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter

from outrider_crds.base import seconds
from outrider_crds.rollout_settings import OnInconclusive, RolloutCanary
from outrider_crds.rollout_status import MOST_RESTARTED_PODS, RolloutStatus, RolloutSums

from outrider_operator.decide.canary.arms import Arms, arms_by_product, has_requests, updated
from outrider_operator.decide.canary.judge import CanaryVerdict, Judgement, judge
from outrider_operator.decide.canary.record import (
    LEFT,
    OPEN,
    CanaryPhase,
    Cause,
    is_foreign,
    measured_s,
    started_s,
    timestamp,
    with_clock,
)
from outrider_operator.validation.reading import cut


@dataclass(frozen=True)
class CanaryPods:
    """Observations of the canary's pods."""

    reports: tuple[RolloutSums, ...] = ()
    """Sums of the pods that host both arms."""
    living: frozenset[str] = frozenset()
    """Names of all canary pods."""
    products: frozenset[str] = frozenset()
    """Products that are to be measured, whether a pod of each has reported or not."""
    trouble: tuple[Cause, str] | None = None
    """Why a pod cannot start, answer or host both arms, and its sentence."""
    not_loaded: str = ""
    """A pod's sentence about a drafter of the candidate that it has not loaded."""
    allowed_restarts: int | None = 1
    """Ends of a process that was ready with both arms that are not the candidate's doing; None: all."""
    unused: str = ""
    """Names of the candidate's own drafters, if its requests hardly used any of them; else empty."""
    out_of_memory: str = ""
    """A sentence about a pod that was last ended for want of memory; empty without one."""


@dataclass(frozen=True)
class CanaryView:
    at: float
    """Unix seconds."""
    stable: str
    """Revision that serves; empty before the first one that had a ready pod."""
    candidate: str
    """Revision of the spec."""
    pool_differs: bool
    """Are the candidate's drafters others than the stable's? Else it rolls out without a canary."""
    is_canary: bool = True
    """Is rollout.strategy DraftCanary? Else the candidate rolls out without a canary."""
    is_paused: bool = False
    """spec.paused, or replicas is 0: nothing is decided."""
    hold: str = ""
    """Why the pools cannot be compared now, in a sentence (speculation is off): pods run, and nothing is decided."""
    baseline_trouble: str = ""
    """Why no pod that serves is well, in a sentence; empty while one is."""
    is_rolled_out: bool = False
    """Does every pod run the candidate?"""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Pod that serves -> restarts of its engine so far."""
    pods: CanaryPods = CanaryPods()
    orders: Mapping[str, str] = field(default_factory=dict)
    """promote, abort, retry -> the service's annotation: a revision, with a number ("8a1e43c8ca/2") to order the same
    once more."""
    settings: RolloutCanary = field(default_factory=RolloutCanary)


@dataclass(frozen=True)
class CanaryStep:
    canary: RolloutStatus | None
    """None: the candidate rolls out as without a canary."""
    ended: RolloutStatus | None = None
    """The one before it, Superseded or Cancelled by a change of the spec."""
    judgement: Judgement | None = None
    """Judgement of the requests so far, while the canary is measured."""
    unknown_orders: tuple[str, ...] = ()
    """Annotations that name no revision of this canary: they do nothing."""


_MOST_OBEYED = 8
"""Orders that are remembered of a canary: each names its attempt, and annotations are three."""
_PHASES_OF_ORDER: Mapping[str, tuple[CanaryPhase, ...]] = {
    "promote": (*OPEN, CanaryPhase.FAILED),
    "abort": OPEN,
    "retry": (CanaryPhase.FAILED, CanaryPhase.ERROR, CanaryPhase.INCONCLUSIVE),
}
"""Order -> phases in which it is carried out."""
_ENDS = {"promote": (CanaryPhase.PROMOTING, Cause.NONE), "abort": (CanaryPhase.FAILED, Cause.ABORTED_BY_HAND)}
_BY_VERDICT: Mapping[CanaryVerdict, Cause] = {
    CanaryVerdict.WORSE: Cause.WORSE,
    CanaryVerdict.SLO_LOWERED: Cause.SLO_LOWERED,
    CanaryVerdict.DRAFTER_FAILED: Cause.DRAFTER_FAILED,
}


def needs_canary(before: RolloutStatus | None, view: CanaryView) -> bool:
    """Must the candidate be measured before it serves from the stable's pods? The way back to the revision that the
    last canary was measured against is free: an incident must not wait for a measurement."""
    is_way_back = before is not None and before.stable == view.candidate
    return view.is_canary and view.pool_differs and view.stable not in ("", view.candidate) and not is_way_back


def judged(settings: RolloutCanary, products: Mapping[str, Arms]) -> Judgement:
    return judge(products, least_gain=settings.least_gain_percent / 100.0, min_requests=settings.min_requests)


def step(before: RolloutStatus | None, view: CanaryView) -> CanaryStep:
    if is_foreign(before):
        return CanaryStep(before)  # left as it is
    if before is not None and view.is_canary and _goes_on(before, view):
        after, judgement = _continued(before, view)
        return CanaryStep(after, judgement=judgement, unknown_orders=_unknown(after, view))
    ended = _ended(before, view)
    if view.is_paused and ended is None:
        return CanaryStep(before, unknown_orders=_unknown(before, view))
    obeyed = before.obeyed if before is not None else []  # the annotations are still there
    begun = _new(before, view, view.stable, obeyed) if needs_canary(before, view) else None
    return CanaryStep(begun, ended, unknown_orders=_unknown(begun, view))


def _goes_on(before: RolloutStatus, view: CanaryView) -> bool:
    """Is `before` the canary of the candidate? A candidate that was left, or has run and does not any more, is measured
    again when it comes back. So is one that failed against another revision than the one that serves."""
    is_over = before.phase in LEFT or (before.phase == CanaryPhase.FAILED and before.stable != view.stable)
    return before.candidate == view.candidate and not (is_over and needs_canary(before, view))


def _in_phase(canary: RolloutStatus, phase: CanaryPhase, cause: Cause = Cause.NONE, detail: str = "") -> RolloutStatus:
    return canary.model_copy(update={"phase": phase.value, "cause": cause.value, "detail": cut(detail, 2048)})


def _new(before: RolloutStatus | None, view: CanaryView, stable: str, obeyed: list[str]) -> RolloutStatus:
    """A new attempt of the candidate, which counts from 0. Its start names it, so it is another one than that of
    `before`, whose operator's clock may have been ahead."""
    start = timestamp(view.at if before is None else max(view.at, started_s(before) + 1))
    new = RolloutStatus(
        phase=CanaryPhase.STARTING.value,
        candidate=view.candidate,
        stable=stable,
        started_at=start,
        held_since=start,
        obeyed=obeyed,
        restarts_before=dict(nlargest(MOST_RESTARTED_PODS, view.restarts.items(), key=itemgetter(1))),
        candidate_percent=view.settings.candidate_percent,
    )
    return _let_out(new, view) or new


def _let_out(canary: RolloutStatus, view: CanaryView) -> RolloutStatus | None:
    """`canary` as it rolls out without a verdict, where no pod that serves is well: its candidate may be the remedy."""
    if not view.baseline_trouble or view.is_paused:
        return None
    return _in_phase(canary, CanaryPhase.PROMOTING, Cause.NO_HEALTHY_BASELINE, view.baseline_trouble)


def _ended(before: RolloutStatus | None, view: CanaryView) -> RolloutStatus | None:
    """`before`, where the spec has left it while it was open."""
    if before is None or before.phase not in (*OPEN, CanaryPhase.PROMOTING):
        return None
    if view.candidate == before.candidate:
        return _in_phase(before, CanaryPhase.CANCELLED, Cause.STRATEGY_CHANGED)
    return _in_phase(before, CanaryPhase.CANCELLED if view.candidate == before.stable else CanaryPhase.SUPERSEDED)


def _continued(before: RolloutStatus, view: CanaryView) -> tuple[RolloutStatus, Judgement | None]:
    """The canary of an unchanged candidate, a look later."""
    before, is_ordered = _with_orders(before, view)
    if is_ordered:
        return before, None
    if before.phase == CanaryPhase.PROMOTING and view.is_rolled_out:
        return before.model_copy(update={"phase": CanaryPhase.SUCCESSFUL.value}), None
    if before.phase not in OPEN:
        return before, None
    if view.stable == view.candidate:  # its promotion was carried out and not noted
        return _in_phase(before, CanaryPhase.PROMOTING), None
    if (let_out := _let_out(before, view)) is not None:
        return let_out, None
    if before.candidate_percent != view.settings.candidate_percent:
        # Goodput depends on the hour's batch: sums of different shares could favour the worse arm (Simpson's paradox).
        return _new(before, view, before.stable, before.obeyed), None
    return (_counted(before, view), None) if view.is_paused or view.hold else _measured(before, view)


def _with_orders(before: RolloutStatus, view: CanaryView) -> tuple[RolloutStatus, bool]:
    """`before` once the user's newest order is carried out; and whether one was. One that the phase leaves nothing to
    do for counts as obeyed: its annotation stays, and would decide a later canary of the same candidate."""
    for name, phases in _PHASES_OF_ORDER.items():
        if not (obeyed := _new_order(before, view, name)):
            continue
        is_due, before = before.phase in phases, before.model_copy(update={"obeyed": obeyed})
        if is_due and name == "retry":
            return _new(before, view, view.stable or before.stable, obeyed), True
        if is_due:
            return _in_phase(before, *_ENDS[name]), True
    return before, False


def _new_order(before: RolloutStatus, view: CanaryView, name: str) -> list[str]:
    """The orders that are obeyed once this one is; empty where it is of another revision, or was obeyed."""
    value = view.orders.get(name, "")
    is_new = value.partition("/")[0] == before.candidate and f"{name}={value}" not in before.obeyed
    return [*before.obeyed, f"{name}={value}"][-_MOST_OBEYED:] if is_new else []


def _counted(before: RolloutStatus, view: CanaryView) -> RolloutStatus:
    """`before` with the newest sums. The timeout's clock runs while a pod reports some and they can be compared."""
    pods = view.pods
    runs = bool(pods.reports) and pods.trouble is None and not (view.is_paused or view.hold)
    after, sums = with_clock(before, view.at, runs=runs), updated(before.sums, pods.reports, pods.living)
    if has_requests(sums) and not has_requests(before.sums):
        after = after.model_copy(update={"idle_seconds": round(measured_s(after, view.at))})
    return after.model_copy(update={"sums": sums})


def _measured(before: RolloutStatus, view: CanaryView) -> tuple[RolloutStatus, Judgement]:
    """An open canary. What failed it is final; trouble is reported while it lasts. An inconclusive one whose pods stay
    may still fail; only a human promotes it."""
    counted, pods, settings = _counted(before, view), view.pods, view.settings
    products = dict.fromkeys(sorted(pods.products), Arms()) | arms_by_product(counted.sums)
    judgement = judged(settings, products)
    failure = _failure(counted, view, judgement)
    if failure is not None:
        return _in_phase(counted, CanaryPhase.FAILED, *failure), judgement
    is_late = before.phase == CanaryPhase.INCONCLUSIVE
    if is_late and settings.on_inconclusive is not OnInconclusive.PROMOTE:
        return counted, judgement
    if judgement.verdict is CanaryVerdict.BETTER:
        cause = Cause.OWN_DRAFTERS_UNUSED if pods.unused else Cause.NONE
        return _in_phase(counted, CanaryPhase.PROMOTING, cause, pods.unused), judgement
    if pods.trouble is not None:
        return _in_phase(counted, CanaryPhase.ERROR, *pods.trouble), judgement
    if is_late or measured_s(counted, view.at) >= seconds(settings.timeout):
        return _timed_out(counted, settings, products), judgement
    return _in_phase(counted, CanaryPhase.MEASURING if counted.sums else CanaryPhase.STARTING), judgement


def _failure(canary: RolloutStatus, view: CanaryView, judgement: Judgement) -> tuple[Cause, str] | None:
    """Why the candidate fails, and what that is about; None while nothing speaks against it."""
    pods = view.pods
    if pods.not_loaded:
        return Cause.DRAFTER_NOT_LOADED, pods.not_loaded
    restarts = max((entry.restarts for entry in canary.sums), default=0)
    if pods.allowed_restarts is not None and restarts > pods.allowed_restarts:
        return (Cause.NO_ROOM_FOR_BOTH if pods.out_of_memory else Cause.CANDIDATE_CRASHED), pods.out_of_memory
    cause = _BY_VERDICT.get(judgement.verdict)
    detail = f"{view.settings.least_gain_percent:+}" if cause is Cause.WORSE else judgement.slo_class
    return (cause, detail) if cause is not None else None


def _timed_out(canary: RolloutStatus, settings: RolloutCanary, products: Mapping[str, Arms]) -> RolloutStatus:
    """No verdict in time: neither a failure nor a success. A candidate without any request is never promoted."""
    least_requests = [arms.least_requests for arms in products.values()]
    if settings.on_inconclusive is OnInconclusive.PROMOTE and min(least_requests, default=0.0) > 0:
        return _in_phase(canary, CanaryPhase.PROMOTING, Cause.TIMEOUT)
    is_measured = max(least_requests, default=0.0) >= settings.min_requests
    return _in_phase(canary, CanaryPhase.INCONCLUSIVE, Cause.TIMEOUT if is_measured else Cause.NO_TRAFFIC)


def _unknown(canary: RolloutStatus | None, view: CanaryView) -> tuple[str, ...]:
    known = (canary.candidate, canary.stable) if canary is not None else (view.candidate, view.stable)
    orders = view.orders.items()
    return tuple(f"{name}={value}" for name, value in orders if value.partition("/")[0] not in known)
