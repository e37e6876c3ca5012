"""Gives both arms of a draft canary the same mix of batch sizes.

Speculation pays more in small batches than in large ones. Requests of the slower arm last longer, so that more of their
tokens fall into the small batches at the end of a burst: its speed-up would look too good. Each request's step is
therefore weighted by (share of both arms' requests in batches of this size) / (share of its arm's), as in
post-stratification. N requests.
"""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.arms.arm_prices import Credits
from outrider_runtime.control.data.batch import Floats, Ints

ARMS = 2
SIZES = 12
"""Classes of batch sizes: 1, 2 to 3, 4 to 7, ... and the largest."""
MOST_WEIGHT = 4.0
"""Bound of the weights: the first steps of a canary say little of the mix."""


class BatchMix:
    def __init__(self) -> None:
        self._decoded = np.zeros((ARMS, SIZES))
        """Decoding requests, summed over steps, by arm and class of size."""

    def balanced(self, made: Credits, arm: Ints) -> Credits:
        """Weight the seconds of a step. arm: (N,), as `Batch.arm`."""
        if not made.is_counted:
            return made
        decodes = made.tokens > 0
        size = min(int(decodes.sum()).bit_length(), SIZES - 1)
        for number in range(ARMS):
            self._decoded[number, size] += np.count_nonzero(decodes & (arm == number))
        weights = np.append(self._weights(size), 1.0)[arm]  # the last one: of no arm
        return made._replace(price_s=made.price_s * weights, plain_s=made.plain_s * weights)

    def _weights(self, size: int) -> Floats:
        """(2,), by arm."""
        of_size, of_arm = self._decoded[:, size], self._decoded.sum(axis=1)
        if not of_arm.all():
            return np.ones(ARMS)
        both = of_size.sum() / of_arm.sum()
        weights = both * of_arm / np.maximum(1.0, of_size)
        return np.asarray(np.clip(weights, 1 / MOST_WEIGHT, MOST_WEIGHT))
