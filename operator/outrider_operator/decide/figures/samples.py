"""What a window says, and when it holds too little to say anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider_operator.model import Figures

LEAST_TOKENS = 50
LEAST_REQUESTS = 10
"""Below these a window says nothing."""
LEAST_PROBES = 3
"""Two probes may both be off by as much as machines drift."""
QUANTILES = (4.53, 3.31, 2.87, 2.65, 2.52, 2.43, 2.37, 2.32, 2.28)
"""Student's t for 95.45%, as two standard deviations of a normal one, with 2, 3, .. 10 degrees of freedom."""
SIGMAS = 2.0
"""Standard errors with more degrees of freedom."""
LEAST_RATIO, MOST_RATIO = 0.01, 100.0
"""A pod may report anything."""
UNKNOWN_ERROR = 0.05
"""Of the ratio that pods of a release report which does not say how sure it is."""


def attainment(figures: Figures, name: str) -> float | None:
    """Share of finished requests that met the class; None below the least sample."""
    found = figures.slo_classes.get(name)
    if found is None or found.finished < LEAST_REQUESTS:
        return None
    return found.attained / found.finished


@dataclass(frozen=True)
class Speedup:
    """Goodput over that of the same pods without speculation, of all steps."""

    value: float
    low: float
    high: float
    """The interval that holds it with 95%, by Student's t for as many probes as there were."""

    @property
    def told(self) -> bool:
        """It can be told from 1."""
        return self.low > 1.0 or self.high < 1.0


def speedup(figures: Figures) -> Speedup | None:
    """What the probes say of steps that speculate, weighed by the share of steps that do: a few steps cannot halve the
    goodput. A step that verifies proposals takes no less time than a plain one, so a speed-up is never above the tokens
    that a request gets in a step. None before the third probe."""
    measured = _ratio(figures)
    if measured is None:
        return None
    ratio, error = measured
    most = max(1.0, figures.tokens_per_step) if figures.tokens_per_step > 0 else MOST_RATIO
    sigmas = _sigmas(figures)
    share = min(1.0, figures.speculative_steps / figures.steps) if figures.steps > 0 else 1.0
    value, low, high = (
        min(1.0 - share + share * min(max(LEAST_RATIO, bound), MOST_RATIO), most)
        for bound in (ratio, ratio - sigmas * error, ratio + sigmas * error)
    )
    return Speedup(value, low, high)


def _sigmas(figures: Figures) -> float:
    """Standard errors on either side of a mean of so many probes."""
    degrees = max(2, round(figures.probes) - 1) if figures.probe_weight > 0 else math.inf
    return QUANTILES[int(degrees) - 2] if degrees < 2 + len(QUANTILES) else SIGMAS


def _ratio(figures: Figures) -> tuple[float, float] | None:
    """Goodput of steps that speculate by that of steps that do not, and its standard error."""
    if figures.probe_weight > 0 and figures.probes < LEAST_PROBES:
        return None
    if figures.probe_weight > 0:
        return figures.probe_weighted_ratio / figures.probe_weight, 1.0 / math.sqrt(figures.probe_weight)
    if min(figures.baseline_tokens, figures.baseline_s, figures.speculative_tokens, figures.speculative_s) <= 0:
        return None
    speculative, baseline = (
        figures.speculative_tokens / figures.speculative_s, figures.baseline_tokens / figures.baseline_s
    )  # fmt: skip
    return speculative / baseline, UNKNOWN_ERROR


def used_share(figures: Figures) -> float:
    """Share of (request, step) pairs that verified a proposal."""
    used = sum(drafter.request_steps for drafter in figures.drafters.values())
    return used / figures.request_steps if figures.request_steps > 0 else 0.0
