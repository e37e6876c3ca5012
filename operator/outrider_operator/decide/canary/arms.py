"""Counts of the two arms of a canary: sums over finished requests, which add up over pods and restarts."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from outrider_crds.counters import ArmCounters

_MOST_REPORTS = 16
"""Reports up to which those of pods that are gone are kept: more would burden the status for no use."""


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
