"""Windows of a service from the counts that matter."""

from __future__ import annotations

from typing import Any

from outrider_crds.counters import AdapterCounters, DrafterCounters, HistogramState, SLOClassCounters, SpeedupCounters
from outrider_crds.runtime_state import ServiceCounters
from outrider_operator.figure_windows import WindowCounts


def window_counts(
    window_s: float = 60.0, pods: int = 1, rare: dict[str, Any] | None = None, **gained: Any
) -> WindowCounts:
    """Counts of a window. rare: what differs in the longer one."""
    return WindowCounts(window_s, pods, pods, counters(**gained), counters(**gained | (rare or {})))


def counters(request_steps: float = 0, **counts: Any) -> ServiceCounters:
    """request_steps: of any draft length. A counter of probes needs no more than its name."""
    probes = {name: counts.pop(name) for name in SpeedupCounters.model_fields if name in counts}
    speedup = SpeedupCounters().model_copy(update=probes)
    return ServiceCounters().model_copy(update={"draft_length_steps": [request_steps], "speedup": speedup, **counts})


def drafter(tried: float = 0, accepted: float = 0, request_steps: float = 0) -> DrafterCounters:
    counts = {"tried": tried, "accepted": accepted, "request_steps": request_steps}
    return DrafterCounters().model_copy(update=counts)


def slo_class(finished: int, attained: int = 0) -> SLOClassCounters:
    """Every request is in one bucket of TPOT."""
    tpot = HistogramState(counts=[0] * 10 + [finished] + [0] * 17)
    return SLOClassCounters(finished=finished, attained=attained, tpot=tpot)


def adapter(tried: int, accepted: int, finished: int = 0, attained: int = 0) -> AdapterCounters:
    return AdapterCounters(tried=tried, accepted=accepted, finished={"chat": finished}, attained={"chat": attained})
