"""One bar of the issue, judged: an entry of summary.json."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.benchmarks.analysis.statistics import Interval


@dataclass(frozen=True)
class Bar:
    scenario: int
    bar: str
    """What is demanded, in words."""
    bound: float
    at_least: bool
    """True: the ratio must not be below the bound; False: not above."""
    ours: float | None = None
    baseline: str = ""
    """The best baseline (chosen on odd repeats where it is chosen), and where."""
    best_baseline: float | None = None
    ratio: float | None = None
    interval: Interval | None = None
    met: bool | None = None
    """None: not measured, or too little."""
    note: str = ""


def judged(bar: Bar) -> Bar:
    """With `met` from ratio and bound."""
    if bar.ratio is None:
        return bar
    met = bar.ratio >= bar.bound if bar.at_least else bar.ratio <= bar.bound
    return replace(bar, met=met)
