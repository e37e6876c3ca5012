"""The engine's books on its requests, in columns, as vLLM's scheduler keeps them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.simulate.replay.workload import Floats, Ints, Workload

BLOCK_TOKENS = 16
Rows = NDArray[np.int64]
"""Numbers of requests, in the order in which the engine runs them."""


class Requests:
    """Rows are requests of the workload, arrived or not."""

    def __init__(self, load: Workload) -> None:
        count = len(load)
        self.load = load
        self.arrived_s: Floats = load.at_s.copy()
        self.context: Ints = np.zeros(count, np.int64)
        """Tokens whose KV is cached."""
        self.produced: Ints = np.zeros(count, np.int64)
        self.first_s: Floats = np.full(count, np.nan)
        self.done_s: Floats = np.full(count, np.nan)
        self.slot: Ints = np.full(count, -1, np.int64)
        self.preemptions = 0

    def todo(self, rows: Rows) -> Ints:
        """Tokens known but not computed; 1 in a request that decodes: the last sampled one."""
        return np.asarray(self.load.prompt[rows] + self.produced[rows] - self.context[rows])

    def decoding(self, rows: Rows) -> NDArray[np.bool_]:
        return np.asarray((self.produced[rows] > 0) & (self.todo(rows) == 1))

    def left(self, rows: Rows) -> Ints:
        """Tokens that it may still produce."""
        return np.asarray(self.load.output[rows] - self.produced[rows])

    def elapsed_s(self, rows: Rows, now: float) -> Floats:
        return np.where(self.produced[rows] > 0, now - self.first_s[rows], 0.0)


def blocks(tokens: Ints) -> Ints:
    return np.asarray(-(-tokens // BLOCK_TOKENS))
