"""How measured times correct a latency model: two multipliers on what it says, and what they leave, by kind of step."""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.batch import Floats
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import CONSTANT, KNEE

PLAIN, EVEN, UNEVEN = range(3)
"""Kinds of step: nothing is verified, equally many for every request, or not."""
SIZES = 14
"""Powers of two of the batch size that are told apart."""
PRIOR_STEPS = 8.0
"""What the mean of other steps counts for."""


class Multipliers:
    """Recursive least squares with forgetting on a cost of two parts: `y ~ m_1 * part_1 + m_2 * part_2`.

    Parts are seconds as a model predicts them, so both multipliers are 1 where the model is right. Errors are
    relative to the prediction. The prior says that the multipliers' mean is 1, worth `strength` observations, and that
    they are equal, worth `likeness`: a machine that slows down slows both parts, and only data that tell them apart
    part them. Directions that the last data do not show return there instead of drifting.
    """

    def __init__(self, *, half_life: float, strength: float, likeness: float) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._strength, self._likeness = strength, likeness
        self._sums = np.zeros(5)
        self.values = (1.0, 1.0)

    def observe(self, first: float, second: float, seconds: float, base: Floats, costs: Floats) -> None:
        """One observation: the parts as predicted, their sum positive, and what was measured. `costs` become `base`
        corrected, see `rescale`."""
        self.values = _solve(self._sums, self._keep, self._strength, self._likeness, first, second, seconds)
        rescale(base, *self.values, costs)

    def __call__(self, first: float, second: float) -> float:
        """Corrected seconds of two parts."""
        return self.values[0] * first + self.values[1] * second


@compiled
def rescale(base: Floats, constant: float, slope: float, costs: Floats) -> None:
    """costs: (R, 8), set to `base` (R, 8) with its constants times `constant` and all other terms times `slope`."""
    for row in range(base.shape[0]):
        for term in range(base.shape[1]):
            costs[row, term] = base[row, term] * (1.0 if term == KNEE else constant if term == CONSTANT else slope)


@compiled
def _solve(
    sums: Floats, keep: float, strength: float, likeness: float, first: float, second: float, seconds: float
) -> tuple[float, float]:  # fmt: skip
    """The non-negative solution of the normal equations, the prior included:
    `strength * ((m_1 + m_2) / 2 - 1)^2 + likeness * (m_1 - m_2)^2`."""
    total = first + second
    x, y, target = first / total, second / total, seconds / total
    sums *= keep
    sums += np.array([x * x, x * y, y * y, x * target, y * target])
    mean = strength / 4
    a11, a12, a22 = sums[0] + mean + likeness, sums[1] + mean - likeness, sums[2] + mean + likeness
    b1, b2 = sums[3] + 2 * mean, sums[4] + 2 * mean
    determinant = a11 * a22 - a12 * a12  # positive: the prior makes it so
    m1, m2 = (a22 * b1 - a12 * b2) / determinant, (a11 * b2 - a12 * b1) / determinant
    if m1 < 0.0:
        return 0.0, max(0.0, b2 / a22)
    return (max(0.0, b1 / a11), 0.0) if m2 < 0.0 else (m1, m2)


class Deviations:
    """What the model gets wrong about steps of a kind at a size of batch: a mean that is shrunk to the kind's at other
    sizes, that to the mean of all kinds, and that to none. So what all kinds share does not count for those alone that
    were seen, or the others would look cheap."""

    HALF_LIFE_STEPS = 300.0
    MOST_SHARE = 0.5
    """Of the predicted time, that one step may deviate by: the rest is an accident."""

    def __init__(self) -> None:
        self._keep = 0.5 ** (1 / self.HALF_LIFE_STEPS)
        self.sums = np.zeros((3, SIZES, 2))
        """[kind, size, (weight, deviation)]"""

    def observe(self, kind: int, requests: float, seconds: float, predicted_s: float) -> None:
        """A decoding step's time without its drafts, and what the model says of it."""
        most = self.MOST_SHARE * predicted_s
        deviation = min(max(seconds - predicted_s, -most), most)
        _add_deviation(self.sums, self._keep, kind, requests, deviation)


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
    """To be added to the model's prediction of a kind of step."""
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
def _add_deviation(sums: Floats, keep: float, kind: int, requests: float, deviation: float) -> None:
    size = _size(requests)
    sums *= keep
    sums[kind, size, 0] += 1.0
    sums[kind, size, 1] += deviation
