"""Counts of the two arms of a canary: sums over finished requests, which add up over pods and restarts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from outrider_crds.counters import LEAST_SUM_S, ArmCounters
from outrider_crds.rollout_status import RolloutSums

_MOST_REPORTS = 16
"""Reports up to which those of pods that are gone are kept: more would burden the status for no use."""
_MOST_WEIGHT = 4.0
"""Bound of the weights that the runtime gives seconds (its `arm_prices.MOST_WEIGHT`)."""
_MODEL_ERROR = 1.25
"""Factor by which a price may be too low: a model of step times may make a longer step cheaper."""
_LATE_STEPS = 4
"""Steps of a request that may bring no token of its answer: those under way when it ends, or is preempted."""
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


def arms_by_product(sums: Iterable[RolloutSums]) -> dict[str, Arms]:
    """Product -> all that was counted on it."""
    totals: dict[str, Arms] = {}
    for entry in sums:
        totals[entry.product] = totals.get(entry.product, Arms()) + Arms(entry.stable, entry.candidate)
    return totals


def has_requests(sums: Iterable[RolloutSums]) -> bool:
    """Was any request counted?"""
    return any(entry.stable.requests + entry.candidate.requests > 0 for entry in sums)


def updated(sums: Iterable[RolloutSums], reports: Iterable[RolloutSums], living: Collection[str]) -> list[RolloutSums]:
    """`sums` with the newest report of each pod, so that no restart of a pod or of the operator loses any.

    A pod that does not answer, or is gone, keeps its last report: it may come back into view, and must not count
    twice. Processes that have ended are added up by product, as the entry without a pod.
    """
    last = {entry.pod: entry for entry in sums if entry.pod}
    totals = {entry.product: entry for entry in sums if not entry.pod}
    restarts = _most_restarts([entry for entry in (*totals.values(), *last.values()) if entry.pod not in living])
    newest = last | {report.pod: _following(last.get(report.pod), report, restarts) for report in reports}
    restarted = [entry for pod, entry in last.items() if newest[pod].started_at != entry.started_at]
    surplus = _surplus(newest.values(), living)
    for entry in (*restarted, *surplus):
        before = totals.get(entry.product, RolloutSums(product=entry.product))
        both = {"stable": before.stable + entry.stable, "candidate": before.candidate + entry.candidate}
        totals[entry.product] = before.model_copy(update=both)
    ended = [totals[name].model_copy(update={"restarts": restarts.get(name, 0)}) for name in sorted(totals)]
    return [*ended, *(newest[pod] for pod in sorted(newest) if newest[pod] not in surplus)]


def _surplus(reports: Collection[RolloutSums], living: Collection[str]) -> list[RolloutSums]:
    """Reports of the pods that have been gone longest, of which the sums alone are kept."""
    gone = sorted((report for report in reports if report.pod not in living), key=lambda report: report.started_at)
    return gone[: max(0, len(reports) - _MOST_REPORTS)]


def _following(last: RolloutSums | None, report: RolloutSums, restarts: Mapping[str, int]) -> RolloutSums:
    """`report` with its pod's restarts; `last` is the report before it. A process that reports may get requests of the
    candidate, so its end counts before one has finished. What ends before it reports is not the candidate's doing.
    restarts: product -> those that a new pod begins with."""
    if last is None:
        return report.model_copy(update={"restarts": restarts.get(report.product, 0)})
    return report.model_copy(update={"restarts": last.restarts + (report.started_at != last.started_at)})


def _most_restarts(gone: Iterable[RolloutSums]) -> dict[str, int]:
    """Product -> restarts that its next pod begins with: another name is no clean record."""
    most: dict[str, int] = {}
    for entry in gone:
        most[entry.product] = max(entry.restarts, most.get(entry.product, 0))
    return most


def impossible(sums: ArmCounters, age_s: float, most_tokens: int, most_requests: int) -> str:
    """What of `sums` no pod can have counted, in words; empty if all is possible. age_s: age of the process.
    most_tokens: of a request in a step. most_requests: in a step."""
    most_s = sums.requests * age_s * _MOST_WEIGHT * most_tokens
    most_steps = sums.tokens + sums.requests * _LATE_STEPS * most_tokens
    faults = {
        "more seconds than its age allows": max(sums.plain_s, sums.price_s) > most_s,
        f"a speed-up above {most_tokens}": sums.plain_s > most_tokens * _MODEL_ERROR * sums.price_s,
        "more steps than its tokens allow": sum(sums.batch_steps) > most_steps,
        f"batches of more than {most_requests} requests": any(sums.batch_steps[most_requests.bit_length() :]),
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
