"""The state machine of a canary: a pure step from the last status and the observed pods to the next status.

It has no timers: every decision depends on `started_at`, so an operator that was killed continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from outrider_crds.rollout_settings import OnInconclusive

from outrider_operator.decide.canary.arms import Arms, Ledger, PodReport, updated
from outrider_operator.decide.canary.judge import CanaryVerdict, Judgement, judge


class CanaryPhase(StrEnum):
    STARTING = "Starting"
    MEASURING = "Measuring"
    PROMOTING = "Promoting"
    SUCCESSFUL = "Successful"
    FAILED = "Failed"
    ERROR = "Error"
    INCONCLUSIVE = "Inconclusive"
    SUPERSEDED = "Superseded"
    CANCELLED = "Cancelled"


class Cause(StrEnum):
    """Why a canary is in its phase."""

    NONE = ""
    WORSE = "Worse"
    SLO_LOWERED = "SLOLowered"
    DRAFTER_FAILED = "DrafterFailed"
    DRAFTER_NOT_LOADED = "DrafterNotLoaded"
    CANDIDATE_CRASHED = "CandidateCrashed"
    ABORTED_BY_HAND = "AbortedByHand"
    NO_CAPACITY = "NoCapacity"
    POD_CANNOT_START = "PodCannotStart"
    PODS_DO_NOT_ANSWER = "PodsDoNotAnswer"
    RUNTIME_TOO_OLD = "RuntimeTooOld"
    NO_ROOM_FOR_BOTH = "NoRoomForBoth"
    STABLE_NOT_LOADED = "StableNotLoaded"
    CANNOT_HOST_BOTH = "CannotHostBoth"
    TIMEOUT = "Timeout"
    NO_TRAFFIC = "NoTraffic"
    IMPOSSIBLE_SUMS = "ImpossibleSums"
    NO_HEALTHY_BASELINE = "NoHealthyBaseline"
    OWN_DRAFTERS_UNUSED = "OwnDraftersUnused"
    STRATEGY_CHANGED = "StrategyChanged"


@dataclass(frozen=True)
class CanarySettings:
    """Settings in spec.rollout.canary."""

    least_gain: float = -0.03
    min_requests: int = 100
    timeout_s: float = 6 * 3600.0
    on_inconclusive: OnInconclusive = OnInconclusive.HOLD
    candidate_percent: int = 50


@dataclass(frozen=True)
class CanaryPods:
    """Observations of the canary's pods."""

    reports: tuple[PodReport, ...] = ()
    """Sums of the pods that host both arms."""
    living: frozenset[str] = frozenset()
    """Names of all canary pods."""
    products: frozenset[str] = frozenset()
    """Products that are to be measured, whether a pod of each has reported or not."""
    trouble: tuple[Cause, str] | None = None
    """Why a pod cannot start, answer or host both arms, and its sentence."""
    not_loaded: str = ""
    """A pod's sentence about a drafter of the candidate that it has not loaded."""
    restarts_under_candidate: int = 0
    """Times that a process ended once it was ready with both arms, beyond those of a stable pod in that time."""
    unused: str = ""
    """Names of the candidate's own drafters, if its requests hardly used any of them; else empty."""
    out_of_memory: str = ""
    """A sentence about a pod that was last ended for want of memory; empty without one."""


@dataclass(frozen=True)
class Orders:
    """The service's annotations promote, abort and retry: each names a revision, with a number ("8a1e43c8ca/2") to
    order the same once more."""

    promote: str = ""
    abort: str = ""
    retry: str = ""

    @property
    def by_name(self) -> dict[str, str]:
        orders = {"promote": self.promote, "abort": self.abort, "retry": self.retry}
        return {name: value for name, value in orders.items() if value}


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
    pods: CanaryPods = CanaryPods()
    orders: Orders = Orders()
    settings: CanarySettings = CanarySettings()


@dataclass(frozen=True)
class Canary:
    """State of a canary in the status."""

    phase: str
    """A `CanaryPhase`, or the phase that a newer release wrote."""
    candidate: str
    stable: str
    started_at: float
    cause: Cause = Cause.NONE
    said: str = ""
    """What the cause is about: a sentence of a pod or the cluster, an SLO class, the percent of leastGainPercent."""
    obeyed: tuple[str, ...] = ()
    """Orders that were carried out, or had nothing to do ("abort=8a1e43c8ca"): their annotations stay, and mean nothing
    any more."""
    ledger: Ledger = field(default_factory=Ledger)
    candidate_percent: int = 50
    """Share of the requests that the candidate gets. Goodput depends on the hour's batch, so sums of different shares
    must not be added: the pooled ratio could favour the worse arm (Simpson's paradox)."""
    held_s: float = 0.0
    """Seconds without a measurement (no pod reports, paused, Error): they do not count towards the timeout."""
    held_since: float = 0.0
    """Unix seconds at which such a time began that lasts; 0 without one."""
    idle_s: float = 0.0
    """Seconds of the measurement before the first request was counted."""

    def measured_s(self, at: float) -> float:
        """Seconds from the start to `at` (Unix seconds) that count towards the timeout."""
        return (self.held_since or at) - self.started_at - self.held_s

    @property
    def is_held(self) -> bool:
        """Can nothing be measured now, while there is no verdict?"""
        return bool(self.held_since) and self.phase in _OPEN

    def with_pause(self, at: float) -> Canary:
        """The canary while nothing can be measured."""
        is_counted = self.held_since or self.phase not in _OPEN
        return self if is_counted else replace(self, held_since=at)

    def without_pause(self, at: float) -> Canary:
        """The canary once something can be measured again."""
        if not self.held_since:
            return self
        return replace(self, held_s=self.held_s + max(0.0, at - self.held_since), held_since=0.0)

    @property
    def attempt(self) -> str:
        """Name of the attempt: a retry of the same candidate has another one, and counts from 0."""
        return f"{self.candidate}-{self.started_at:.0f}"

    @property
    def holds_rollout(self) -> bool:
        """Must the candidate stay away from the stable's pods?"""
        return self.phase not in (
            CanaryPhase.PROMOTING,
            CanaryPhase.SUCCESSFUL,
            CanaryPhase.SUPERSEDED,
            CanaryPhase.CANCELLED,
        )

    def has_pods(self, on_inconclusive: OnInconclusive) -> bool:
        """True if a canary pod should run."""
        is_open = self.phase == CanaryPhase.INCONCLUSIVE and on_inconclusive is not OnInconclusive.ROLLBACK
        return is_open or self.phase in _UNDER_WAY


_MOST_OBEYED = 8
"""Orders that are remembered of a canary: each names its attempt, and annotations are three."""
_UNDER_WAY = (CanaryPhase.STARTING, CanaryPhase.MEASURING, CanaryPhase.ERROR)
_OPEN = (*_UNDER_WAY, CanaryPhase.INCONCLUSIVE)
"""Phases without a verdict."""
_PHASES_OF_ORDER: Mapping[str, tuple[CanaryPhase, ...]] = {
    "promote": (*_OPEN, CanaryPhase.FAILED),
    "abort": _OPEN,
    "retry": (CanaryPhase.FAILED, CanaryPhase.ERROR, CanaryPhase.INCONCLUSIVE),
}
"""Order -> phases in which it is carried out."""
_BY_VERDICT: Mapping[CanaryVerdict, Cause] = {
    CanaryVerdict.WORSE: Cause.WORSE,
    CanaryVerdict.SLO_LOWERED: Cause.SLO_LOWERED,
    CanaryVerdict.DRAFTER_FAILED: Cause.DRAFTER_FAILED,
}


@dataclass(frozen=True)
class CanaryStep:
    canary: Canary | None
    """None: the candidate rolls out as without a canary."""
    ended: Canary | None = None
    """The one before it, Superseded or Cancelled by a change of the spec."""
    judgement: Judgement | None = None
    """Judgement of the requests so far, while the canary is measured."""
    unknown_orders: tuple[str, ...] = ()
    """Annotations that name no revision of this canary: they do nothing."""


def step(before: Canary | None, look: CanaryView) -> CanaryStep:
    if before is not None and before.phase not in list(CanaryPhase):
        return CanaryStep(before)  # a newer release's: left as it is
    if before is not None and look.is_canary and _goes_on(before, look):
        after, judgement = _continued(before, look)
        return CanaryStep(after, judgement=judgement, unknown_orders=_unknown(after, look))
    ended = _ended(before, look)
    if look.is_paused and ended is None:
        return CanaryStep(before, unknown_orders=_unknown(before, look))
    begun = _begun(before, look)
    return CanaryStep(begun, ended, unknown_orders=_unknown(begun, look))


def needs_canary(before: Canary | None, look: CanaryView) -> bool:
    """Must the candidate be measured before it serves from the stable's pods? The way back to the revision that the
    last canary was measured against is free: an incident must not wait for a measurement."""
    is_way_back = before is not None and before.stable == look.candidate
    return look.is_canary and look.pool_differs and look.stable not in ("", look.candidate) and not is_way_back


def _goes_on(before: Canary, look: CanaryView) -> bool:
    """Is `before` the canary of the candidate? A candidate that was left, or has run and does not any more, is measured
    again when it comes back. So is one that failed against another revision than the one that serves."""
    is_over = before.phase in (CanaryPhase.SUCCESSFUL, CanaryPhase.SUPERSEDED, CanaryPhase.CANCELLED)
    is_over = is_over or (before.phase == CanaryPhase.FAILED and before.stable != look.stable)
    return before.candidate == look.candidate and not (is_over and needs_canary(before, look))


def _begun(before: Canary | None, look: CanaryView) -> Canary | None:
    """Orders that were obeyed once stay so: their annotations are still there when a candidate comes back."""
    if not needs_canary(before, look):
        return None
    obeyed = before.obeyed if before is not None else ()
    return _new(before, look, look.stable, obeyed)


def _new(before: Canary | None, look: CanaryView, stable: str, obeyed: tuple[str, ...]) -> Canary:
    """A new attempt of the candidate, which counts from 0."""
    start, percent = _start(before, look), look.settings.candidate_percent
    new = Canary(CanaryPhase.STARTING, look.candidate, stable, start, obeyed=obeyed, candidate_percent=percent)
    return _let_out(new, look) or new.with_pause(start)


def _let_out(canary: Canary, look: CanaryView) -> Canary | None:
    """`canary` as it rolls out without a verdict, where no pod that serves is well: its candidate may be the remedy."""
    if not look.baseline_trouble or look.is_paused:
        return None
    cause, said = Cause.NO_HEALTHY_BASELINE, look.baseline_trouble
    return replace(canary, phase=CanaryPhase.PROMOTING, cause=cause, said=said)


def _start(before: Canary | None, look: CanaryView) -> float:
    """Start of a new attempt. It names the attempt, so it is another one than that of `before`, whose operator's clock
    may have been ahead."""
    return look.at if before is None else max(look.at, before.started_at + 1)


def _ended(before: Canary | None, look: CanaryView) -> Canary | None:
    """`before`, where the spec has left it while it was open."""
    if before is None or before.phase not in (*_OPEN, CanaryPhase.PROMOTING):
        return None
    if look.candidate == before.candidate:
        return replace(before, phase=CanaryPhase.CANCELLED, cause=Cause.STRATEGY_CHANGED, said="")
    phase = CanaryPhase.CANCELLED if look.candidate == before.stable else CanaryPhase.SUPERSEDED
    return replace(before, phase=phase, cause=Cause.NONE, said="")


def _continued(before: Canary, look: CanaryView) -> tuple[Canary, Judgement | None]:
    """The canary of an unchanged candidate, a look later."""
    before = _with_spent_orders(before, look)
    ordered = _ordered(before, look)
    if ordered is not None:
        return ordered, None
    if before.phase == CanaryPhase.PROMOTING and look.is_rolled_out:
        return replace(before, phase=CanaryPhase.SUCCESSFUL), None
    if look.stable == look.candidate and before.phase in _OPEN:  # its promotion was carried out and not noted
        return replace(before, phase=CanaryPhase.PROMOTING, cause=Cause.NONE, said=""), None
    if before.phase not in _OPEN:
        return before, None
    if (let_out := _let_out(before, look)) is not None:
        return let_out, None
    if before.candidate_percent != look.settings.candidate_percent:
        return _new(before, look, before.stable, before.obeyed), None
    if look.is_paused or look.hold:
        return _counted(before, look), None
    return _measured(before, look)


def _counted(before: Canary, look: CanaryView) -> Canary:
    """`before` with the newest sums. The timeout's clock runs while a pod reports some and they can be compared."""
    ledger = updated(before.ledger, look.pods.reports, look.pods.living)
    runs = bool(look.pods.reports) and look.pods.trouble is None and not (look.is_paused or look.hold)
    after = before.without_pause(look.at) if runs else before.with_pause(look.at)
    is_first = not before.ledger.has_requests and ledger.has_requests
    return replace(after, ledger=ledger, idle_s=after.measured_s(look.at) if is_first else before.idle_s)


def _ordered(before: Canary, look: CanaryView) -> Canary | None:
    """Order of a user by an annotation; None without one, or if it was obeyed before."""
    if obeyed := _new_order(before, look, "promote"):
        return replace(before, phase=CanaryPhase.PROMOTING, cause=Cause.NONE, said="", obeyed=obeyed)
    if obeyed := _new_order(before, look, "abort"):
        return replace(before, phase=CanaryPhase.FAILED, cause=Cause.ABORTED_BY_HAND, said="", obeyed=obeyed)
    if obeyed := _new_order(before, look, "retry"):
        return _new(before, look, look.stable or before.stable, obeyed)
    return None


def _with_spent_orders(before: Canary, look: CanaryView) -> Canary:
    """`before` with the orders that its phase leaves nothing to do for. They count as obeyed: their annotations stay,
    and would decide a later canary of the same candidate."""
    spent = [name for name, phases in _PHASES_OF_ORDER.items() if before.phase not in phases]
    for name in spent:
        if obeyed := _new_order(before, look, name):
            before = replace(before, obeyed=obeyed)
    return before


def _new_order(before: Canary, look: CanaryView, name: str) -> tuple[str, ...]:
    """The orders that are obeyed once this one is; empty where it is of another revision, or was obeyed."""
    value = look.orders.by_name.get(name, "")
    is_new = value.partition("/")[0] == before.candidate and f"{name}={value}" not in before.obeyed
    return (*before.obeyed, f"{name}={value}")[-_MOST_OBEYED:] if is_new else ()


def _measured(before: Canary, look: CanaryView) -> tuple[Canary, Judgement | None]:
    """An open canary. What failed it is final; trouble is reported while it lasts. An inconclusive one whose pods stay
    may still fail; only a human promotes it."""
    counted = _counted(before, look)
    canary, ledger = replace(counted, cause=Cause.NONE, said=""), counted.ledger
    settings = look.settings
    products = dict.fromkeys(sorted(look.pods.products), Arms()) | ledger.products()
    judgement = (
        judge(products, least_gain=settings.least_gain, min_requests=settings.min_requests) if products else None
    )
    failed = _failed(canary, look, judgement)
    if failed is not None:
        return failed, judgement
    is_late = before.phase == CanaryPhase.INCONCLUSIVE
    if is_late and settings.on_inconclusive is not OnInconclusive.PROMOTE:
        return counted, judgement
    if judgement is not None and judgement.verdict is CanaryVerdict.BETTER:
        cause = Cause.OWN_DRAFTERS_UNUSED if look.pods.unused else Cause.NONE
        return replace(canary, phase=CanaryPhase.PROMOTING, cause=cause, said=look.pods.unused), judgement
    if look.pods.trouble is not None:
        cause, said = look.pods.trouble
        return replace(canary, phase=CanaryPhase.ERROR, cause=cause, said=said), judgement
    if is_late or canary.measured_s(look.at) >= settings.timeout_s:
        return _timed_out(canary, settings, products), judgement
    return replace(canary, phase=CanaryPhase.MEASURING if ledger.products() else CanaryPhase.STARTING), judgement


def _failed(canary: Canary, look: CanaryView, judgement: Judgement | None) -> Canary | None:
    """`canary` as it fails; None while nothing speaks against the candidate."""
    pods = look.pods
    if pods.not_loaded:
        return replace(canary, phase=CanaryPhase.FAILED, cause=Cause.DRAFTER_NOT_LOADED, said=pods.not_loaded)
    if pods.restarts_under_candidate > 1:
        cause = Cause.NO_ROOM_FOR_BOTH if pods.out_of_memory else Cause.CANDIDATE_CRASHED
        return replace(canary, phase=CanaryPhase.FAILED, cause=cause, said=pods.out_of_memory)
    if judgement is not None and judgement.verdict in _BY_VERDICT:
        cause, line = _BY_VERDICT[judgement.verdict], f"{100 * look.settings.least_gain:+.0f}"
        said = line if cause is Cause.WORSE else judgement.slo_class
        return replace(canary, phase=CanaryPhase.FAILED, cause=cause, said=said)
    return None


def _timed_out(canary: Canary, settings: CanarySettings, products: Mapping[str, Arms]) -> Canary:
    """No verdict in time: neither a failure nor a success. A candidate without any request is never promoted."""
    least_requests = [arms.least_requests for arms in products.values()]
    if settings.on_inconclusive is OnInconclusive.PROMOTE and min(least_requests, default=0.0) > 0:
        return replace(canary, phase=CanaryPhase.PROMOTING, cause=Cause.TIMEOUT)
    is_measured = max(least_requests, default=0.0) >= settings.min_requests
    return replace(canary, phase=CanaryPhase.INCONCLUSIVE, cause=Cause.TIMEOUT if is_measured else Cause.NO_TRAFFIC)


def _unknown(canary: Canary | None, look: CanaryView) -> tuple[str, ...]:
    known = (canary.candidate, canary.stable) if canary is not None else (look.candidate, look.stable)
    return tuple(name for name, value in look.orders.by_name.items() if value.partition("/")[0] not in known)
