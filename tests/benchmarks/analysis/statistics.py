"""Means, spread and bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95
Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    value: float
    interval: Interval | None
    """95%, by bootstrap; None where a single observation says nothing of its spread."""


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values. Raises ValueError without any."""
    if not values:
        raise ValueError("no values")
    return math.exp(sum(map(math.log, values)) / len(values))


def geometric_estimate(ratios: Sequence[float], seed: int = 0) -> Estimate:
    """Geometric mean of the ratios; they are resampled."""
    logs = np.log(np.asarray(ratios, dtype=float))
    return Estimate(geometric_mean(ratios), bootstrap(logs, lambda rows: np.exp(rows.mean(axis=1)), seed))


def bootstrap(
    observations: NDArray[np.float64],  # (n,)
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],  # (resamples, n) -> (resamples,)
    seed: int = 0,
) -> Interval | None:
    """The statistic's middle 95% over resampled observations (percentile bootstrap); None for fewer than two."""
    if len(observations) < 2:
        return None
    rng = np.random.default_rng(seed)
    drawn = observations[rng.integers(0, len(observations), (RESAMPLES, len(observations)))]
    low, high = np.quantile(statistic(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def is_odd(repeat: int) -> bool:
    return repeat % 2 == 1
