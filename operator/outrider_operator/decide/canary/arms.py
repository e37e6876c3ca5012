"""Counts of the two arms of a canary: sums over finished requests, which add up over pods and restarts."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from outrider_crds.counters import LEAST_SUM_S, ArmCounters

_MOST_REPORTS = 16
"""Reports up to which those of pods that are gone are kept: more would burden the status for no use."""
_MOST_WEIGHT = 4.0
"""Bound of the weights that the runtime gives seconds (its `arm_prices.MOST_WEIGHT`)."""
_MODEL_ERROR = 1.25
"""Factor by which a price may be too low: a model of step times may make a longer step cheaper."""
_ROUNDED_S2 = 1e-9
"""Seconds squared that rounding takes from a sum of squares."""


@dataclass(frozen=True)
class Arms:
    """Both arms on one product."""

    stable: ArmCounters = field(default_factory=ArmCounters)
    candidate: ArmCounters = field(default_factory=ArmCounters)

    def __add__(self, other: Arms) -> Arms:
        return Arms(self.stable + other.stable, self.candidate + other.candidate)

    @property
    def least_requests(self) -> float:
        """Requests of the arm that has fewer."""
        return min(self.stable.requests, self.candidate.requests)


@dataclass(frozen=True)
class PodReport:
    """A canary pod's sums since its process started."""

    pod: str
    product: str
    started_at: float
    """Unix time; another one means another process, which counts from 0."""
    arms: Arms
    restarts: int = 0
    """Processes of the pod that ended once it was ready with both arms, and of a pod before it that is gone. The ledger
    counts them."""


@dataclass(frozen=True)
class Ledger:
    """A canary's sums. It is kept in the status, so that no restart of a pod or of the operator loses any."""

    ended: Mapping[str, Arms] = field(default_factory=dict)
    """Product -> sums of processes that have ended."""
    ended_restarts: Mapping[str, int] = field(default_factory=dict)
    """Product -> restarts of the pod that had most, of pods that are gone."""
    running: tuple[PodReport, ...] = ()
    """The last report of each pod, those that are gone included."""

    def products(self) -> dict[str, Arms]:
        """Product -> all that was counted on it."""
        totals = dict(self.ended)
        for report in self.running:
            totals[report.product] = totals.get(report.product, Arms()) + report.arms
        return totals

    @property
    def has_requests(self) -> bool:
        """Was any request counted?"""
        return any(arms.stable.requests + arms.candidate.requests > 0 for arms in self.products().values())

    @property
    def most_restarts(self) -> int:
        """Restarts of the pod that has most: one fault of a node may end a process in each."""
        return max([report.restarts for report in self.running] + list(self.ended_restarts.values()), default=0)


def updated(ledger: Ledger, reports: Iterable[PodReport], living: Container[str]) -> Ledger:
    """`ledger` with the newest report of each pod. A pod that does not answer, or is gone, keeps its last one: it may
    come back into view, and must not count twice."""
    before = {report.pod: report for report in ledger.running}
    restarts = _most_restarts(ledger, [last for pod, last in before.items() if pod not in living])
    newest = {**before, **{report.pod: _following(before.get(report.pod), report, restarts) for report in reports}}
    restarted = [last for pod, last in before.items() if newest[pod].started_at != last.started_at]
    surplus = _surplus(newest.values(), living)
    ended = dict(ledger.ended)
    for last in (*restarted, *surplus):
        ended[last.product] = ended.get(last.product, Arms()) + last.arms
    kept = tuple(newest[pod] for pod in sorted(newest) if newest[pod] not in surplus)
    return Ledger(ended, restarts, kept)


def _surplus(reports: Collection[PodReport], living: Container[str]) -> list[PodReport]:
    """Reports of the pods that have been gone longest, of which the sums alone are kept."""
    gone = sorted((report for report in reports if report.pod not in living), key=lambda report: report.started_at)
    return gone[: max(0, len(reports) - _MOST_REPORTS)]


def _following(last: PodReport | None, report: PodReport, restarts: Mapping[str, int]) -> PodReport:
    """`report` with its pod's restarts; `last` is the report before it. A process that reports may get requests of the
    candidate, so its end counts before one has finished. What ends before it reports is not the candidate's doing.
    restarts: product -> those that a new pod begins with."""
    if last is None:
        return replace(report, restarts=restarts.get(report.product, 0))
    return replace(report, restarts=last.restarts + (report.started_at != last.started_at))


def _most_restarts(ledger: Ledger, gone: Iterable[PodReport]) -> dict[str, int]:
    """Product -> restarts that its next pod begins with: another name is no clean record."""
    most = dict(ledger.ended_restarts)
    for last in gone:
        if last.restarts > most.get(last.product, 0):
            most[last.product] = last.restarts
    return most


def impossible(sums: ArmCounters, age_s: float, most_tokens: int) -> str:
    """What of `sums` no pod can have counted, in words; empty if all is possible. age_s: age of the process.
    most_tokens: of a request in a step."""
    most_s = sums.requests * age_s * _MOST_WEIGHT * most_tokens
    faults = {
        "more seconds than its age allows": max(sums.plain_s, sums.price_s) > most_s,
        f"a speed-up above {most_tokens}": sums.plain_s > most_tokens * _MODEL_ERROR * sums.price_s,
        "more speculated than plain seconds": sums.speculated_s > sums.plain_s + LEAST_SUM_S * sums.requests,
        "squares below those of equal requests": _exceeds(sums, sums.plain_s, sums.requests, sums.plain_squared)
        or _exceeds(sums, sums.price_s, sums.requests, sums.price_squared),
        "a correlation above 1": _exceeds(sums, sums.plain_times_price, sums.plain_squared, sums.price_squared),
        "more requests that met a class than finished": any(
            count > sums.finished.get(name, 0) for name, count in sums.attained.items()
        ),
    }
    return next((words for words, is_fault in faults.items() if is_fault), "")


def _exceeds(sums: ArmCounters, mixed: float, first: float, second: float) -> bool:
    """Is `mixed`^2 above `first` x `second` (Cauchy and Schwarz), by more than rounding?"""
    slack = _ROUNDED_S2 * (1.0 + sums.requests)
    return mixed**2 > (first + slack) * (second + slack) * (1.0 + 1e-6)
