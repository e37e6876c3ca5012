"""What the model of a step gets wrong, learned online: two multipliers on a cost, by recursive least squares with
forgetting."""

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
