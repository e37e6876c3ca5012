"""Chooses the proposals that the target verifies, like the device in `vllm_plugin.device_ranking`.

    score(request, k) = weight * p_1 * ... * p_k,    p_i = P(token i accepted | its parent was); 0: no proposal

Shapes: N requests of a step, K proposals of each at most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.plans import DeviceOrder
from outrider_runtime.loop.confidences import QUANTA_PER_UNIT, UNKNOWN, Calibration
from outrider_runtime.simulate.recording import DEPTH
from outrider_runtime.simulate.replay.replay_requests import Rows
from outrider_runtime.simulate.replay.workload import Floats, Ints

MIN_ACCEPTANCE = 1e-4
"""Lower bound of P(accepted) of a real proposal: 0 stands for no proposal."""


class RankedProposals:
    def __init__(self, requests: int) -> None:
        """requests: number of requests of the load."""
        self._acceptance = np.zeros((requests, DEPTH))

    def record(
        self, rows: Rows, lengths: Ints, drafters: Ints, quanta: NDArray[np.int8], calibration: Calibration
    ) -> None:  # fmt: skip
        """Record a step's proposals. lengths, drafters: (N,). quanta: (N, K), their quantised confidences."""
        self._acceptance[rows] = acceptance(lengths, drafters, quanta, calibration)

    def lengths(self, rows: Rows, placeholders: Ints, order: DeviceOrder) -> Ints:
        """(N,): proposals to verify. placeholders: (N,), scheduled draft tokens. order: with the columns of `rows`."""
        forced = np.minimum(order.forced, placeholders)
        tokens = min(max(order.tokens, int(forced.sum())), int(placeholders.sum()))
        survival: Floats = self._acceptance[rows].cumprod(axis=1) * order.weights[:, None]
        return verification_lengths(survival, placeholders, forced, tokens)


def acceptance(lengths: Ints, drafters: Ints, quanta: NDArray[np.int8], calibration: Calibration) -> Floats:
    """(N, K): P(token accepted | its parent was) = 1 / (1 + exp(-(slope * confidence + intercept))); 0: no proposal."""
    values = np.where(quanta == UNKNOWN, 0, quanta) / QUANTA_PER_UNIT
    odds = calibration.slopes[drafters, None] * values + calibration.intercepts[drafters, : quanta.shape[1]]
    chances = np.maximum(1.0 / (1.0 + np.exp(-odds)), MIN_ACCEPTANCE)
    return np.where(np.arange(quanta.shape[1]) < lengths[:, None], chances, 0.0)


def verification_lengths(survival: Floats, caps: Ints, forced: Ints, tokens: int) -> Ints:
    """(N,): proposals to verify of each request, `tokens` in total.

    Forced tokens come first, then the highest scores; ties go to the first request, then to the lowest k.

    survival: (N, K), scores. caps: (N,), never exceeded. forced: (N,), tokens that come first if they are real.
    """
    depth = np.arange(survival.shape[1])
    scores = np.where((depth < forced[:, None]) & (survival > 0), np.inf, survival)
    scores = np.where(depth < caps[:, None], scores, -1.0)
    first = np.argsort(-scores, axis=None, kind="stable")[:tokens]
    return np.bincount(first // survival.shape[1], minlength=len(caps)).astype(np.int64)
