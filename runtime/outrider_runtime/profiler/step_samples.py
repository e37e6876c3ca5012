"""Measured steps, and the summary of several measured steps of one shape."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import Shape
from outrider_runtime.profiler.grid import GridPoint


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured step."""

    shape: Shape
    """Shape that the step really had."""
    mode: ExecutionMode
    target_s: float
    """Seconds of the target."""
    draft_tokens: int = 0
    """Draft length (K) of the proposals at the step's end."""
    draft_width: int = 1
    """Nodes at each depth of these proposals; 1: chains."""
    draft_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each drafter, by name."""

    def scale_to_full_speed(self, speed: float) -> MeasuredStep:
        """Return the step with the times that it would have had at full speed. speed: speed it had / full speed."""
        drafts = {name: speed * seconds for name, seconds in self.draft_s.items()}
        return dataclasses.replace(self, target_s=speed * self.target_s, draft_s=drafts)


@dataclass(frozen=True, slots=True)
class Visit:
    """Consecutive measured steps of one shape."""

    point: GridPoint
    samples: tuple[MeasuredStep, ...]
    suspended: str = ""
    """Why the drafter to be measured does not run, as a sentence; empty if it does."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Time of one shape: the median over its visits of each visit's fastest step.

    Within a visit, noise only adds time, so the fastest step counts. Between visits, which lie far apart in time, the
    machine's speed may change both ways, so the median counts.
    """

    point: GridPoint
    shape: Shape
    mode: ExecutionMode
    seconds: float
    spread: float
    """Time of the second fastest visit / time of the fastest - 1 (lower is better); NaN with one visit."""
    draft_tokens: int = 0
    draft_width: int = 1


def target_measurements(visits: Iterable[Visit]) -> list[Measurement]:
    """Return one measurement per shape, of the target's times."""
    return _measure(visits, lambda sample: sample.target_s)


def drafter_measurements(visits: Iterable[Visit], drafter: str) -> list[Measurement]:
    """Return one measurement per shape in which `drafter` ran, of that drafter's times."""
    return _measure(visits, lambda sample: sample.draft_s.get(drafter, math.nan))


def median_spread(measurements: Sequence[Measurement]) -> float:
    """Return the median of the shapes' spreads; 0 if no shape was visited twice."""
    spreads = [m.spread for m in measurements if not math.isnan(m.spread)]
    return statistics.median(spreads) if spreads else 0.0


def _measure(visits: Iterable[Visit], seconds: Callable[[MeasuredStep], float]) -> list[Measurement]:
    groups: dict[GridPoint, list[MeasuredStep]] = {}  # point -> the fastest step of each visit
    for visit in visits:
        timed = [sample for sample in visit.samples if seconds(sample) > 0]  # NaN: not measured
        if timed:
            groups.setdefault(visit.point, []).append(min(timed, key=seconds))
    return [_measurement(point, sorted(fastest, key=seconds), seconds) for point, fastest in groups.items()]


def _measurement(
    point: GridPoint, ranked: Sequence[MeasuredStep], seconds: Callable[[MeasuredStep], float]
) -> Measurement:
    middle = ranked[(len(ranked) - 1) // 2]
    spread = seconds(ranked[1]) / seconds(ranked[0]) - 1.0 if len(ranked) > 1 else math.nan
    return Measurement(
        point, middle.shape, middle.mode, seconds(middle), spread, middle.draft_tokens, middle.draft_width
    )
