"""Least squares as step times need them: no coefficient is negative, little data stays close to what is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def non_negative(gram: Floats, moment: Floats) -> Floats:
    """argmin over b >= 0 of `b' gram b - 2 moment' b` (Lawson-Hanson on the normal equations).

    gram: (p, p), positive semi-definite; moment: (p,). Columns that explain nothing get 0.
    """
    size = len(moment)
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram = gram / np.outer(scale, scale) + 1e-12 * np.eye(size)
    moment = moment / scale
    tolerance = 1e-10 * max(1.0, float(np.abs(moment).max()))
    active = np.zeros(size, dtype=bool)
    solution = np.zeros(size)
    for _ in range(3 * size):
        gradient = moment - gram @ solution
        gradient[active] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= tolerance:
            break
        active[entering] = True
        solution = _feasible(gram, moment, active, solution)
    return np.asarray(solution / scale)


def _feasible(gram: Floats, moment: Floats, active: NDArray[np.bool_], start: Floats) -> Floats:
    """Move from `start` to the unconstrained optimum over `active`, dropping what turns negative on the way."""
    current = start
    while active.any():
        goal = np.zeros_like(current)
        index = np.flatnonzero(active)
        goal[index] = np.linalg.solve(gram[np.ix_(index, index)], moment[index])
        blocked = active & (goal <= 0)
        if not blocked.any():
            return goal
        share = float((current[blocked] / np.maximum(current[blocked] - goal[blocked], 1e-300)).min())
        current = current + share * (goal - current)
        active &= current > 1e-14
        current[~active] = 0.0
    return np.zeros_like(current)


class Multipliers:
    """Recursive least squares with forgetting on a cost of two parts: `y ~ m_1 * part_1 + m_2 * part_2`.

    Parts are seconds as a model predicts them, so both multipliers are 1 where the model is right. Errors are
    relative to the prediction. The prior says that the multipliers' mean is 1, worth `strength` observations, and that
    they are equal, worth `likeness`: a machine that slows down slows both parts, and only data that tell them apart
    part them. Directions that the last data do not show return there instead of drifting.

    Plain floats: this runs at every step, and arrays of two would cost fifty times as much.
    """

    def __init__(self, *, half_life: float, strength: float, likeness: float) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._strength = strength
        self._likeness = likeness
        self._a11 = self._a12 = self._a22 = self._b1 = self._b2 = 0.0
        self.values = (1.0, 1.0)

    def observe(self, first: float, second: float, seconds: float) -> None:
        """One observation: the parts as predicted, their sum positive, and what was measured."""
        total, keep = first + second, self._keep
        x, y, target = first / total, second / total, seconds / total
        self._a11 = keep * self._a11 + x * x
        self._a12 = keep * self._a12 + x * y
        self._a22 = keep * self._a22 + y * y
        self._b1 = keep * self._b1 + x * target
        self._b2 = keep * self._b2 + y * target
        self.values = self._solve()

    def _solve(self) -> tuple[float, float]:
        """The non-negative solution of the normal equations, the prior included:
        `strength * ((m_1 + m_2) / 2 - 1)^2 + likeness * (m_1 - m_2)^2`."""
        mean, like = self._strength / 4, self._likeness
        a11, a12, a22 = self._a11 + mean + like, self._a12 + mean - like, self._a22 + mean + like
        b1, b2 = self._b1 + 2 * mean, self._b2 + 2 * mean
        determinant = a11 * a22 - a12 * a12  # positive: the prior makes it so
        first, second = (a22 * b1 - a12 * b2) / determinant, (a11 * b2 - a12 * b1) / determinant
        if first < 0:
            return 0.0, max(0.0, b2 / a22)
        if second < 0:
            return max(0.0, b1 / a11), 0.0
        return first, second
