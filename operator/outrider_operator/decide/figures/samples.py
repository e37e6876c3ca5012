"""What is measured of a service: attainment and speed-up of a window with enough samples, and their form in texts.

Figures have three significant digits, so that noise does not change the status.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider_crds.conditions import Condition, ConditionType, find_condition
from outrider_crds.counters import SpeedupCounters
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.figure_windows import FigureWindows, WindowCounts

LEAST_TOKENS = 50
"""Tokens that a window needs before its goodput or acceptance rate counts."""
LEAST_REQUESTS = 10
"""Finished requests of a class that a window needs before its attainment counts."""
USED_SHARE = 0.05
"""Least share of (request, step) pairs from which speculation counts as used. Exploration alone takes 1%."""
LEAST_PROBES = 3
"""Probes that a speed-up needs: two may both be wrong by as much as machines drift."""
QUANTILES = (4.53, 3.31, 2.87, 2.65, 2.52, 2.43, 2.37, 2.32, 2.28)
"""Student's t for 95.45% (two standard deviations of a normal distribution) with 2, 3, .. 10 degrees of freedom."""
SIGMAS = 2.0
"""Standard errors of the interval with more than 10 degrees of freedom."""
LEAST_RATIO, MOST_RATIO = 0.01, 100.0
"""Bounds of a ratio that pods report: a faulty pod may report anything."""
UNKNOWN_ERROR = 0.05
"""Standard error of a ratio from pods of an older release, which report none."""


def three_digits(value: float) -> str:
    """1234.5 -> "1230", 12.345 -> "12.3", 0 -> "0"."""
    return f"{float(f'{value:.3g}'):.10g}"


def rounded(value: float) -> int:
    """A count with three significant digits."""
    return int(float(f"{value:.3g}"))


def time_text(seconds: float) -> str:
    """Milliseconds below one second ("31.2ms"), seconds above ("1.5s")."""
    return f"{three_digits(seconds * 1000)}ms" if seconds < 1 else f"{three_digits(seconds)}s"


def bytes_text(count: int) -> str:
    """Format a size as a Kubernetes quantity: 1536 -> "1.5Ki"."""
    value, unit = float(count), ""
    for larger in ("Ki", "Mi", "Gi", "Ti"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{three_digits(value)}{unit}"


def percentile_s(counts: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """The `share` quantile of a histogram with upper `bounds` and one more count than bounds.

    It is interpolated within a bucket. None without observations; the last bound if the quantile lies above it.
    """
    total = sum(counts)
    if total <= 0:
        return None
    rank, below, lower = share * total, 0.0, 0.0
    for count, bound in zip(counts, bounds, strict=False):
        if count > 0 and below + count >= rank:
            return lower + (bound - lower) * max(0.0, rank - below) / count
        below, lower = below + count, bound
    return bounds[-1]


@dataclass(frozen=True)
class MeasuredBehaviour:
    windows: FigureWindows
    last_status: SpeculativeServiceStatus
    states: Mapping[str, RuntimeState]
    """Name of a ready pod -> its last report."""
    is_served: bool
    """True while a pod is ready."""

    @property
    def between_windows(self) -> bool:
        """True in the first minute after the operator's start while pods serve: the last figures stay in the status."""
        return self.windows.current is None and not self.windows.error and self.is_served

    def last_condition(self, kind: ConditionType) -> Condition | None:
        return find_condition(self.last_status.conditions, kind)


def attainment(figures: WindowCounts, name: str) -> float | None:
    """Share of finished requests that met the class; None with too few requests."""
    slo_class = figures.gained.slo_classes.get(name)
    if slo_class is None or slo_class.finished < LEAST_REQUESTS:
        return None
    return slo_class.attained / slo_class.finished


@dataclass(frozen=True)
class Speedup:
    """Goodput of all steps / goodput of the same pods without speculation (higher is better)."""

    value: float
    low: float
    high: float
    """Upper bound of the 95% interval, by Student's t for the number of probes."""

    @property
    def is_significant(self) -> bool:
        """True if the interval does not contain 1."""
        return self.low > 1.0 or self.high < 1.0


def speedup(figures: WindowCounts) -> Speedup | None:
    """Speed-up of all steps; None before the third probe.

    The probes measure steps that speculate, so their ratio is weighted by the share of such steps. A step that verifies
    a proposal is no faster than a plain one, so the speed-up never exceeds the tokens per step of a request.
    """
    measured = _ratio(figures.rare.speedup)
    if measured is None:
        return None
    (ratio, error), rare = measured, figures.rare
    most = max(1.0, rare.tokens_per_step) if rare.tokens_per_step > 0 else MOST_RATIO
    sigmas = _sigmas(rare.speedup)
    share = min(1.0, rare.speculative_steps / rare.steps) if rare.steps > 0 else 1.0
    value, low, high = (
        min(1.0 - share + share * min(max(LEAST_RATIO, bound), MOST_RATIO), most)
        for bound in (ratio, ratio - sigmas * error, ratio + sigmas * error)
    )
    return Speedup(value, low, high)


def _sigmas(counted: SpeedupCounters) -> float:
    """Half width of the interval, in standard errors, for the number of probes."""
    degrees = max(2, round(counted.probes) - 1) if counted.weight > 0 else math.inf
    return QUANTILES[int(degrees) - 2] if degrees < 2 + len(QUANTILES) else SIGMAS


def _ratio(counted: SpeedupCounters) -> tuple[float, float] | None:
    """Goodput of steps that speculate / goodput of plain steps, and its standard error; None with too few probes."""
    if counted.weight > 0 and counted.probes < LEAST_PROBES:
        return None
    if counted.weight > 0:
        return counted.weighted_ratio / counted.weight, 1.0 / math.sqrt(counted.weight)
    if min(counted.baseline_tokens, counted.baseline_s, counted.speculative_tokens, counted.speculative_s) <= 0:
        return None
    speculative = counted.speculative_tokens / counted.speculative_s
    baseline = counted.baseline_tokens / counted.baseline_s
    return speculative / baseline, UNKNOWN_ERROR


def used_share(figures: WindowCounts) -> float:
    """Share of (request, step) pairs that verified a proposal."""
    used = sum(drafter.request_steps for drafter in figures.gained.drafters.values())
    return used / figures.gained.request_steps if figures.gained.request_steps > 0 else 0.0
