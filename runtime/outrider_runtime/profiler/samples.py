"""What a measurement is, and what several of one shape come to."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider_runtime.control.cost.model import Shape
from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.profiler.grid import GridPoint


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step."""

    shape: Shape
    """What the step really processed."""
    mode: ExecutionMode
    target_s: float
    draft_tokens: int = 0
    """K that was proposed at its end."""
    draft_width: int = 1
    """Nodes at each depth of what was."""
    draft_s: dict[str, float] = field(default_factory=dict)
    """Seconds by drafter."""

    def at(self, speed: float) -> Sample:
        """As it would have been on a machine at its usual speed, where it had `speed` of that."""
        drafts = {name: speed * seconds for name, seconds in self.draft_s.items()}
        return dataclasses.replace(self, target_s=speed * self.target_s, draft_s=drafts)


@dataclass(frozen=True, slots=True)
class Visit:
    """Measured steps of one shape, one after the other."""

    point: GridPoint
    samples: tuple[Sample, ...]
    suspended: str = ""
    """Why the drafter that was asked for does not run, in a sentence; empty when it does."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One shape's cost. Within a visit noise only ever adds time, so its fastest step stands for it; among the visits,
    which lie far apart and may each have had another speed of the machine, the middle one does."""

    point: GridPoint
    shape: Shape
    mode: ExecutionMode
    seconds: float
    spread: float
    """How much slower the fastest step of the second best visit was, as a share; NaN with one visit."""
    draft_tokens: int = 0
    draft_width: int = 1


def target_measurements(visits: Iterable[Visit]) -> list[Measurement]:
    """One measurement per shape, from the target's times."""
    return _measure(visits, lambda sample: sample.target_s)


def drafter_measurements(visits: Iterable[Visit], drafter: str) -> list[Measurement]:
    """One measurement per shape in which `drafter` ran, from its times."""
    return _measure(visits, lambda sample: sample.draft_s.get(drafter, math.nan))


def median_spread(measurements: Sequence[Measurement]) -> float:
    """Typical run-to-run spread of a shape, as a share; 0 when no shape was visited twice."""
    spreads = [m.spread for m in measurements if not math.isnan(m.spread)]
    return statistics.median(spreads) if spreads else 0.0


def _measure(visits: Iterable[Visit], seconds: Callable[[Sample], float]) -> list[Measurement]:
    groups: dict[GridPoint, list[Sample]] = {}  # point -> the fastest step of each visit
    for visit in visits:
        timed = [sample for sample in visit.samples if seconds(sample) > 0]  # NaN: not measured
        if timed:
            groups.setdefault(visit.point, []).append(min(timed, key=seconds))
    return [_measurement(point, sorted(fastest, key=seconds), seconds) for point, fastest in groups.items()]


def _measurement(point: GridPoint, ranked: Sequence[Sample], seconds: Callable[[Sample], float]) -> Measurement:
    middle = ranked[(len(ranked) - 1) // 2]
    spread = seconds(ranked[1]) / seconds(ranked[0]) - 1.0 if len(ranked) > 1 else math.nan
    return Measurement(
        point, middle.shape, middle.mode, seconds(middle), spread, middle.draft_tokens, middle.draft_width
    )
