"""Bars: the least ratio ours / another system, at the 5% quantile over paired seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

QUANTILE = 0.05


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    where: str
    value: float
    least: float
    against: str
    seeds: int

    @property
    def holds(self) -> bool:
        return bool(self.value >= self.least)

    def line(self) -> str:
        verdict = "holds " if self.holds else "MISSED"
        return f"{verdict} {self.value:6.3f} of {self.least:5.3f}  {self.name}: {self.where} (against {self.against})"


def summary(bars: Sequence[Bar]) -> list[str]:
    """Summarise bars by name: the points at which a bar holds, and the worst one."""
    lines = []
    for name in sorted({bar.name for bar in bars}):
        named_bars = [bar for bar in bars if bar.name == name]
        worst = min(named_bars, key=lambda bar: bar.value / bar.least)
        met = sum(bar.holds for bar in named_bars)
        lines.append(
            f"{name}: {met} of {len(named_bars)} hold, worst {worst.value:.3f} of {worst.least:.3f} ({worst.where})"
        )
    return lines


def low_quantile(ratios: Sequence[float]) -> float:
    """Return the 5% quantile over seeds."""
    return float(np.quantile(np.asarray(ratios, float), QUANTILE))


def pair_ratios(ours: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return ours / other, seed by seed."""
    return [mine / theirs for mine, theirs in zip(ours, other, strict=True)]


def best_on_means(figures: Mapping[str, Sequence[float]]) -> str:
    """Return the name with the largest mean: the best setting is chosen once, not for each seed."""
    return max(figures, key=lambda name: float(np.mean(figures[name])))


def geometric_mean(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))
