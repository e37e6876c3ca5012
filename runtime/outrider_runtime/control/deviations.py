"""What the model of a step gets wrong about each kind of step at each size of batch: there lies its error at the
crossover, and the time that no device reports (the scheduler's, which is longer in a step that verifies)."""

from __future__ import annotations

from outrider_runtime.control.batch import Floats
from outrider_runtime.control.compiled import compiled

PLAIN, EVEN, UNEVEN = range(KINDS := 3)
"""Kinds of step: nothing is verified, equally many for every request, or not."""
SIZES = 14
"""Powers of two of the batch size that are told apart."""
PRIOR_STEPS = 8.0
"""What the mean of other steps counts for."""
KEEP = 0.5 ** (1 / 300)
"""Of what was known of deviations, at each step."""
MOST_DEVIATION = 0.5
"""Of the predicted time, that one step may deviate by: the rest is an accident."""


@compiled
def _size(requests: float) -> int:
    """Number of a batch size among SIZES."""
    size, rest = 0, int(requests)
    while rest:
        rest >>= 1
        size += 1
    return min(size, SIZES - 1)


@compiled
def _deviation(sums: Floats, kind: int, size: int) -> float:
    """To be added to the model's prediction of a kind of step: its mean, shrunk to the kind's at other sizes, that to
    the mean of all kinds, and that to none. So what all kinds share does not count for those alone that were seen, or
    the others would look cheap."""
    weight = total = kind_weight = kind_total = 0.0
    for k in range(sums.shape[0]):
        for s in range(sums.shape[1]):
            weight += sums[k, s, 0]
            total += sums[k, s, 1]
            if k == kind:
                kind_weight += sums[k, s, 0]
                kind_total += sums[k, s, 1]
    own_weight, own = sums[kind, size, 0], sums[kind, size, 1]
    mean = (total - kind_total) / (weight - kind_weight + PRIOR_STEPS)
    mean = (kind_total - own + PRIOR_STEPS * mean) / (kind_weight - own_weight + PRIOR_STEPS)
    return float((own + PRIOR_STEPS * mean) / (own_weight + PRIOR_STEPS))


@compiled
def deviations(sums: Floats, requests: float) -> tuple[float, float, float]:
    """Of each kind of step at a batch size. One that verifies does all that a plain one does: where it seems to take
    less, the plain ones came in a slow spell of the machine."""
    size = _size(requests)
    plain = _deviation(sums, PLAIN, size)
    return plain, max(plain, _deviation(sums, EVEN, size)), max(plain, _deviation(sums, UNEVEN, size))


@compiled
def add_deviation(sums: Floats, kind: int, requests: float, seconds: float, predicted_s: float) -> None:
    """A decoding step's time without its drafts, and what the model says of it."""
    most, size = MOST_DEVIATION * predicted_s, _size(requests)
    sums *= KEEP
    sums[kind, size, 0] += 1.0
    sums[kind, size, 1] += min(max(seconds - predicted_s, -most), most)
