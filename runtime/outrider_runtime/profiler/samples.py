"""What a measurement is, and what several of one shape come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider_runtime.control.batch import ExecutionMode
from outrider_runtime.control.costs import Shape
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
    draft_s: dict[str, float] = field(default_factory=dict)
    """Seconds by drafter."""


@dataclass(frozen=True, slots=True)
class Visit:
    """Measured steps of one shape, one after the other."""

    point: GridPoint
    samples: tuple[Sample, ...]
    suspended: str = ""
    """Why the drafter that was asked for does not run, in a sentence; empty when it does."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One shape's cost: noise only ever adds time, so the lowest of its visits' medians stands for it."""

    point: GridPoint
    shape: Shape
    mode: ExecutionMode
    seconds: float
    spread: float
    """How much higher the second lowest visit was, as a share; NaN with one visit."""
    draft_tokens: int = 0


def target_measurements(visits: Iterable[Visit]) -> list[Measurement]:
    """One measurement per shape, from the target's times."""
    return [
        m for group in _by_point(visits) if (m := _measure(group, [[s.target_s for s in v.samples] for v in group]))
    ]


def drafter_measurements(visits: Iterable[Visit], drafter: str) -> list[Measurement]:
    """One measurement per shape in which `drafter` ran, from its times."""
    measured = []
    for group in _by_point(visits):
        ran = [Visit(v.point, tuple(s for s in v.samples if drafter in s.draft_s)) for v in group]
        ran = [visit for visit in ran if visit.samples]
        measured.append(_measure(ran, [[s.draft_s[drafter] for s in v.samples] for v in ran]))
    return [m for m in measured if m is not None]


def median_spread(measurements: Sequence[Measurement]) -> float:
    """Typical run-to-run spread of a shape, as a share; 0 when no shape was visited twice."""
    spreads = [m.spread for m in measurements if not math.isnan(m.spread)]
    return statistics.median(spreads) if spreads else 0.0


def _by_point(visits: Iterable[Visit]) -> list[list[Visit]]:
    groups: dict[GridPoint, list[Visit]] = {}
    for visit in visits:
        groups.setdefault(visit.point, []).append(visit)
    return list(groups.values())


def _measure(visits: Sequence[Visit], times: Sequence[Sequence[float]]) -> Measurement | None:
    medians = [statistics.median(t) if t else math.nan for t in times]
    usable = [index for index, median in enumerate(medians) if math.isfinite(median) and median > 0]
    if not usable:
        return None
    ranked = sorted(usable, key=lambda index: medians[index])
    best = visits[ranked[0]]
    middle = best.samples[len(best.samples) // 2]
    lowest = medians[ranked[0]]
    spread = medians[ranked[1]] / lowest - 1.0 if len(ranked) > 1 else math.nan
    return Measurement(best.point, mean_shape(best.samples), middle.mode, lowest, spread, middle.draft_tokens)


def mean_shape(samples: Sequence[Sample]) -> Shape:
    """Contexts grow by a token a step: the visit's mean stands for it."""
    count = len(samples)
    return Shape(
        n_context=sum(s.shape.n_context for s in samples) / count,
        n_batched=sum(s.shape.n_batched for s in samples) / count,
        n_requests=sum(s.shape.n_requests for s in samples) / count,
        n_context_query=sum(s.shape.n_context_query for s in samples) / count,
    )
