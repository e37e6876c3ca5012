"""Online calibration of each drafter's confidence, as in vLLM: from confidence to acceptance rate.

    P(token k of drafter d accepted, its parent was) = 1 / (1 + exp(-(slope[d] * confidence + intercept[d, k])))

A model's confidence is the log-odds of its token; a lookup's says how many of its matches agree (`drafters.suffix`).
Every hundred steps one damped Newton step over the trials since then refits slopes and intercepts, as vLLM's
OnlineAcceptanceEstimator does, from the same start values; here a step is limited, too. Only the host refits; the
result travels with the order, so all ranks agree.

Shapes: D drafters, K depths, M nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider_runtime.control.batch import Bools, Floats
from outrider_runtime.control.plans import Forest

UNKNOWN = -128
"""An int8 that stands for an unknown confidence."""
MAX_QUANTA = 127
"""The largest int8."""
QUANTA_PER_UNIT = 8
"""Confidence is quantised in steps of 0.125, from -15.9 to 15.9."""
START_SLOPE = 0.5
START_INTERCEPT = -0.2
"""vLLM's start values: the medians of five published drafters."""
REFIT_STEPS = 100
DAMPING_TRIALS = 50.0
"""Trials that let a refit move a value half of the way."""
RIDGE = 1e-3
MAX_SLOPE_STEP, MAX_INTERCEPT_STEP = 0.25, 1.0
"""Most that one refit moves a value. Where predictions are near 0 or 1, trials weigh almost nothing, and an unlimited
Newton step diverges: a few accepted tokens of a lookup moved an intercept from -21 to 5101, for good."""


def confidences(quanta: npt.NDArray[np.int8]) -> Floats:
    """Decode int8 values to confidences; NaN: unknown."""
    return np.where(quanta == UNKNOWN, np.nan, quanta.astype(np.float64) / QUANTA_PER_UNIT)


class Calibration(NamedTuple):
    """The fitted parameters, as a worker gets them."""

    slopes: npt.NDArray[np.float32]
    """(D,)"""
    intercepts: npt.NDArray[np.float32]
    """(D, K)"""


class Calibrator:
    def __init__(self, drafters: int, depths: int) -> None:
        self._slopes = np.full(drafters, START_SLOPE)
        self._intercepts = np.full((drafters, depths), START_INTERCEPT)
        self._sums = np.zeros((6, drafters, depths))
        """Sums over the trials since the last refit: n, w, w f, w f^2, residual, residual f."""
        self._steps = 0

    @property
    def current(self) -> Calibration:
        return Calibration(self._slopes.astype(np.float32), self._intercepts.astype(np.float32))

    def acceptance(self, drafter: npt.NDArray[np.int64], depth: npt.NDArray[np.int64], confidence: Floats) -> Floats:
        """(M,): P(token accepted | its parent was). depth: from 0."""
        return np.asarray(
            1.0 / (1.0 + np.exp(-(self._slopes[drafter] * confidence + self._intercepts[drafter, depth])))
        )

    def observe(self, forest: Forest, tried: Bools, accepted: Bools) -> None:
        """Count a step's trials. A token without a confidence counts with confidence 0."""
        if not tried.any():
            return
        drafters, depths = self._intercepts.shape
        drafter, depth = forest.drafter[tried], np.minimum(forest.depth[tried], depths) - 1
        confidence, labels = np.nan_to_num(forest.confidence[tried]), accepted[tried]
        chance = self.acceptance(drafter, depth, confidence)
        weight, residual, cells = chance * (1.0 - chance), labels - chance, drafter * depths + depth
        columns = (
            np.ones_like(confidence),
            weight,
            weight * confidence,
            weight * confidence**2,
            residual,
            residual * confidence,
        )
        for sums, column in zip(self._sums, columns, strict=True):
            sums += np.bincount(cells, column, drafters * depths).reshape(drafters, depths)
        self._steps += 1
        if self._steps >= REFIT_STEPS:
            self._refit()

    def _refit(self) -> None:
        """One Newton step of the penalised logistic regression: (X'WX + ridge) step = X'(y - p).

        X'WX is an arrowhead, for each drafter one slope over all depths, so the solution is in closed form:
        slope step = (g0 - sum(b g1 / c)) / (a - sum(b^2 / c)); intercept step = (g1 - b * slope step) / c.
        """
        count, c, b, a, g1, g0 = self._sums
        c = c + RIDGE
        step = (g0.sum(1) - (b * g1 / c).sum(1)) / (a.sum(1) + RIDGE - (b * b / c).sum(1))
        step *= count.sum(1) / (count.sum(1) + DAMPING_TRIALS)
        step = np.where(np.isfinite(step), step, 0.0)
        step = np.clip(step, -np.minimum(MAX_SLOPE_STEP, self._slopes), MAX_SLOPE_STEP)  # a slope is never negative
        moves = (g1 - b * step[:, None]) / c * count / (count + DAMPING_TRIALS)
        moves = np.where(np.isfinite(moves), moves, 0.0)
        self._slopes = self._slopes + step
        self._intercepts = self._intercepts + np.clip(moves, -MAX_INTERCEPT_STEP, MAX_INTERCEPT_STEP)
        self._sums[:] = 0.0
        self._steps = 0
