"""What the model of a step gets wrong, learned online: two multipliers on a cost, and what they leave.

Each cost is corrected by recursive least squares with forgetting, on two parts of it. What that leaves of the target is
learned for each kind of step at each size of batch: there lies its error at the crossover, and the time that no device
reports (the scheduler's, which is longer in a step that verifies).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.model import CONSTANT, KNEE
from outrider_runtime.control.data.batch import Floats

TARGET_MEMORY = (0.5 ** (1 / 50), 0.3, 8.0)
"""See `correct`. Noise comes in spells of many steps, so a window of 70 holds only a few spells: unlikeness needs good
reasons."""
DRAFT_MEMORY = (0.5 ** (1 / 12), 0.3, 1.0)
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


class Believed(NamedTuple):
    """A cost as it was profiled or guessed, and as it is believed: two multipliers, of constants and of all else. Of
    drafters each array has one row more for each."""

    base: Floats
    """(R, 8)"""
    sums: Floats
    """(5,), of the normal equations."""
    values: Floats
    """(2,): the multipliers."""
    costs: Floats
    """(R, 8): `base`, corrected."""


@compiled
def rescale(believed: Believed) -> None:
    base, (constant, rest) = believed.base, believed.values
    for row in range(base.shape[0]):
        for term in range(base.shape[1]):
            factor = 1.0 if term == KNEE else constant if term == CONSTANT else rest
            believed.costs[row, term] = base[row, term] * factor


@compiled
def correct(
    believed: Believed, memory: tuple[float, float, float], first: float, second: float, seconds: float
) -> None:
    """Recursive least squares with forgetting on a cost of two parts: `y ~ m_1 * part_1 + m_2 * part_2`.

    Parts are seconds as a model predicts them, so both multipliers are 1 where the model is right. Errors are relative
    to the prediction. The prior is `strength * ((m_1 + m_2) / 2 - 1)^2 + likeness * (m_1 - m_2)^2`: a machine that
    slows down slows both parts, and only data that tell them apart part them. Directions that the last data do not show
    return there instead of drifting. The solution is not negative.

    memory: (share kept at an observation, strength, likeness).
    """
    (keep, strength, likeness), sums, total = memory, believed.sums, first + second
    if total <= 0.0:
        return
    x, y, target = first / total, second / total, seconds / total
    sums *= keep
    sums += np.array([x * x, x * y, y * y, x * target, y * target])
    mean = strength / 4
    a11, a12, a22 = sums[0] + mean + likeness, sums[1] + mean - likeness, sums[2] + mean + likeness
    b1, b2 = sums[3] + 2 * mean, sums[4] + 2 * mean
    determinant = a11 * a22 - a12 * a12  # positive: the prior makes it so
    m1, m2 = (a22 * b1 - a12 * b2) / determinant, (a11 * b2 - a12 * b1) / determinant
    if m1 < 0.0:
        m1, m2 = 0.0, max(0.0, b2 / a22)
    elif m2 < 0.0:
        m1, m2 = max(0.0, b1 / a11), 0.0
    believed.values[0], believed.values[1] = m1, m2
    rescale(believed)


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
