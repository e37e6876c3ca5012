"""The target's cost from nothing but this engine's own steps: means per shape, fitted anew from time to time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider_runtime.control.costs import Shape, StepCost
from outrider_runtime.control.fit import Form, Sample, fit

FIRST_SLOPE = 0.1
"""Before a second shape was seen a further token is taken to cost this share of the step: dear enough to be careful,
cheap enough to try."""
BUCKET_CAP = 40.0
MAX_BUCKETS = 96


@dataclass(slots=True)
class _Bucket:
    """Running means of the steps of about one shape."""

    count: float = 0.0
    n_context: float = 0.0
    n_batched: float = 0.0
    n_requests: float = 0.0
    n_prompt: float = 0.0
    seconds: float = 0.0

    def add(self, shape: Shape, seconds: float) -> None:
        if self.count >= 3:  # noise only ever adds time, and a few hiccups would tilt the whole fit
            seconds = min(seconds, 2.0 * self.seconds)
        self.count = min(self.count + 1.0, BUCKET_CAP)
        share = 1.0 / self.count
        self.n_context += share * (shape.n_context - self.n_context)
        self.n_batched += share * (shape.n_batched - self.n_batched)
        self.n_requests += share * (shape.n_requests - self.n_requests)
        self.n_prompt += share * (shape.n_prompt - self.n_prompt)
        self.seconds += share * (seconds - self.seconds)

    def sample(self) -> Sample:
        shape = Shape(self.n_context, self.n_batched, self.n_requests, n_prompt=self.n_prompt)
        return Sample(shape, self.seconds, weight=math.sqrt(self.count))


class LearnedCost:
    """A table of shapes; its fit changes at powers of two of the observations, then every 128."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._seen = 0
        self.cost = StepCost()

    def observe(self, shape: Shape, seconds: float) -> bool:
        """Returns True when the fit has changed."""
        key = (_bucket(shape.n_batched, 4), _bucket(shape.n_context, 1))
        if key not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
            del self._buckets[min(self._buckets, key=lambda old: self._buckets[old].count)]
        self._buckets.setdefault(key, _Bucket()).add(shape, seconds)
        self._seen += 1
        due = self._seen % 128 == 0 or self._seen & (self._seen - 1) == 0
        if due:
            self.cost = self._fit()
        return due

    def _fit(self) -> StepCost:
        samples = [bucket.sample() for bucket in self._buckets.values()]
        sizes = {round(sample.shape.n_batched) for sample in samples}
        if len(sizes) >= 2:
            return fit(samples, forms=(Form.BASE,)).cost
        only = samples[0]
        slope = FIRST_SLOPE * only.seconds / only.shape.n_batched
        return StepCost(per_batched_token_s=slope, constant_s=only.seconds - slope * only.shape.n_batched)


def _bucket(tokens: float, steps_per_doubling: int) -> int:
    """Exact up to 8 tokens, then logarithmic."""
    if tokens <= 8:
        return int(tokens)
    return 8 + int(steps_per_doubling * math.log2(tokens / 8))
