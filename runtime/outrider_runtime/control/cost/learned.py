"""The target's cost without a profile: learned from the engine's own steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider_runtime.control.cost.fit import Form, Sample, fit
from outrider_runtime.control.cost.model import Shape, StepCost

FIRST_SLOPE = 0.1
"""Seconds of a token / seconds of the step, until a second shape is seen: high enough to be careful, low enough to try
speculation."""
MEAN_OVER = 40.0
"""Steps that a shape's mean rests on at most, so that it follows the machine."""
MOST_SHAPES = 96
"""Shapes that are remembered; the one with the fewest steps makes room for a new one."""


@dataclass(slots=True)
class _Mean:
    """Running means of steps of similar shapes."""

    shape: Shape
    seconds: float
    count: float = 1.0

    def add(self, shape: Shape, seconds: float) -> None:
        if self.count >= 3:  # noise only ever adds time, and a few hiccups would tilt the whole fit
            seconds = min(seconds, 2.0 * self.seconds)
        self.count = min(self.count + 1.0, MEAN_OVER)
        share = 1.0 / self.count
        self.shape = Shape(*(old + share * (new - old) for old, new in zip(self.shape, shape, strict=True)))
        self.seconds += share * (seconds - self.seconds)


class LearnedCost:
    """The target's cost from this engine's own steps alone: a mean for each shape. The cost is fitted again after 1, 2,
    4, .. steps, then every 128."""

    def __init__(self) -> None:
        self._means: dict[tuple[int, int], _Mean] = {}
        self._seen = 0
        self.cost = StepCost()

    def observe(self, shape: Shape, seconds: float) -> bool:
        """Count a step. Returns True when the fit has changed."""
        key = (_bucket(shape.n_batched, 4), _bucket(shape.n_context, 1))
        if key in self._means:
            self._means[key].add(shape, seconds)
        else:
            if len(self._means) >= MOST_SHAPES:
                del self._means[min(self._means, key=lambda old: self._means[old].count)]
            self._means[key] = _Mean(shape._replace(n_context_query=0.0), seconds)
        self._seen += 1
        due = self._seen % 128 == 0 or self._seen & (self._seen - 1) == 0
        if due:
            self.cost = self._fit()
        return due

    def _fit(self) -> StepCost:
        means = list(self._means.values())
        if len({round(mean.shape.n_batched) for mean in means}) >= 2:
            samples = [Sample(mean.shape, mean.seconds, weight=math.sqrt(mean.count)) for mean in means]
            return fit(samples, forms=(Form.BASE,)).cost
        only = means[0]
        slope = FIRST_SLOPE * only.seconds / only.shape.n_batched
        return StepCost(per_batched_token_s=slope, constant_s=only.seconds - slope * only.shape.n_batched)


def _bucket(tokens: float, steps_per_doubling: int) -> int:
    """Number of the bucket that a size falls into: exact up to 8 tokens, then logarithmic."""
    if tokens <= 8:
        return int(tokens)
    return 8 + int(steps_per_doubling * math.log2(tokens / 8))
