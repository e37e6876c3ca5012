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
    """Recursive least squares with forgetting on a cost that is a sum of parts: `y ~ sum_f m_f * part_f`.

    Parts are seconds as a model predicts them, so every multiplier is 1 where the model is right. The prior counts
    as `strength` observations of 1: directions that the last data do not show return to the model instead of
    drifting, and one slow step moves little. Errors are relative to the prediction.
    """

    def __init__(self, parts: int, *, half_life: float, strength: float) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._ridge = strength * np.eye(parts)
        self._gram = np.zeros((parts, parts))
        self._moment = np.zeros(parts)
        self.values = np.ones(parts)

    def observe(self, parts: Floats, seconds: float) -> None:
        """One observation: `parts` (p,) as predicted, their sum positive, and what was measured."""
        relative = parts / parts.sum()
        target = seconds / parts.sum()
        self._gram = self._keep * self._gram + np.outer(relative, relative)
        self._moment = self._keep * self._moment + relative * target
        self.values = non_negative(self._gram + self._ridge, self._moment + self._ridge.sum(axis=0))
