"""Counts of the two arms of a canary: sums over finished requests, which add up over pods and restarts."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from outrider_crds.runtime_state import MOST_COUNTED

_NUMBERS = (
    "requests", "tokens", "plain_s", "speculated_s", "price_s", "plain_squared", "price_squared", "plain_times_price",
    "failures",
)  # fmt: skip
"""Fields of `ArmSums` that are a number each."""
_MOST_REPORTS = 16
"""Reports up to which those of pods that are gone are kept: more would burden the status for no use."""
LEAST_SUM = 1e-9
"""Least divisor, in seconds: what is smaller is no quantity."""


@dataclass(frozen=True)
class ArmSums:
    """One arm's finished requests. A request's price is that of its steps at full batch, by the latency model."""

    requests: float = 0.0
    tokens: float = 0.0
    plain_s: float = 0.0
    """Seconds that plain decoding would have taken for the tokens."""
    speculated_s: float = 0.0
    """Those of them that are of steps in which the arm speculated."""
    price_s: float = 0.0
    plain_squared: float = 0.0
    price_squared: float = 0.0
    plain_times_price: float = 0.0
    failures: float = 0.0
    """Times that a drafter of this arm alone was suspended after an error, of the one that fails most often."""
    finished: Mapping[str, float] = field(default_factory=dict)
    """SLO class -> requests with a verdict."""
    attained: Mapping[str, float] = field(default_factory=dict)
    """SLO class -> those of them that met the class."""

    def __add__(self, other: ArmSums) -> ArmSums:
        sums = {name: _sum(getattr(self, name), getattr(other, name)) for name in _NUMBERS}
        finished, attained = _sums(self.finished, other.finished), _sums(self.attained, other.attained)
        return ArmSums(**sums, finished=finished, attained=attained)

    @property
    def effective_requests(self) -> float:
        """Requests of equal price that would tell as much as these (Kish's effective size)."""
        squares = self.requests * self.price_squared
        return self.requests * min(1.0, self.price_s**2 / squares) if squares > 0.0 else self.requests

    @property
    def speculated_share(self) -> float:
        """Share of the plain seconds in which the arm speculated."""
        return self.speculated_s / self.plain_s if self.plain_s >= LEAST_SUM else 0.0

    @property
    def speedup(self) -> float | None:
        """Seconds of plain decoding / seconds of price; None before any."""
        return self.plain_s / self.price_s if min(self.plain_s, self.price_s) >= LEAST_SUM else None


@dataclass(frozen=True)
class Arms:
    """Both arms on one product."""

    stable: ArmSums = ArmSums()
    candidate: ArmSums = ArmSums()

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


def _sums(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: _sum(first.get(name, 0.0), second.get(name, 0.0)) for name in sorted({*first, *second})}


def _sum(first: float, second: float) -> float:
    """The sum of both, no more than the status can hold: a pod's report may have reached that by itself."""
    return min(first + second, float(MOST_COUNTED))
