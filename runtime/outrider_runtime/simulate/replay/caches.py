"""What each drafter has read of each request: a draft model's prefix, a head's coverage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider_runtime.core.batch import Floats
from outrider_runtime.core.settings import Drafter
from outrider_runtime.simulate.replay.requests import Requests, Rows
from outrider_runtime.simulate.replay.workload import Ints


class Caches:
    """Columns over all requests; D drafters in the pool's order."""

    def __init__(self, drafters: Sequence[Drafter], requests: Requests) -> None:
        shape = (len(drafters), len(requests.load))
        self._drafters, self._requests = drafters, requests
        self._has: Ints = np.zeros(shape, np.int64)
        """Of a draft model: the prefix that it has. Of a head: tokens of the prompt that it has read."""
        self._whole: Ints = np.zeros(shape, np.int64)
        """Of a head: committed tokens since its last hole."""
        self._holed = np.zeros(shape, bool)

    def missing(self, rows: Rows, tokens: Ints) -> Ints:
        """(D, N) as `Batch.missing`; tokens (N,): of the step."""
        columns = np.zeros((len(self._drafters), len(rows)), np.int64)
        for number, drafter in enumerate(self._drafters):
            if drafter.needs_kv:
                columns[number] = self._requests.context[rows] + tokens - self._has[number, rows]
            elif drafter.needs_hidden:
                columns[number] = tokens
        return columns

    def read(self, rows: Rows) -> Floats:
        """(D, N) as `Batch.read`."""
        columns = np.ones((len(self._drafters), len(rows)))
        seen = np.minimum(self._requests.context[rows], self._requests.load.prompt[rows])
        for number, drafter in enumerate(self._drafters):
            if drafter.needs_hidden:
                columns[number] = np.where(seen > 0, self._has[number, rows] / np.maximum(seen, 1), 1.0)
        return columns

    def whole(self, rows: Rows) -> Ints:
        """(D, N) as `Batch.whole`."""
        context = self._requests.context[rows]
        columns = np.tile(context, (len(self._drafters), 1))
        for number, drafter in enumerate(self._drafters):
            if drafter.needs_hidden:
                columns[number] = np.where(self._holed[number, rows], self._whole[number, rows], context)
        return columns

    def feed(self, rows: Rows, fed: Ints, prompts: Ints, committed: Ints) -> None:
        """After a step: fed (D, N) tokens that each drafter ran over, prompts (N,) tokens of prompts in the step,
        committed (N,) tokens by which the context grew. The requests' `context` is the new one."""
        for number, drafter in enumerate(self._drafters):
            if drafter.needs_kv:
                has = self._has[number, rows] + fed[number]
                self._has[number, rows] = np.minimum(has, self._requests.context[rows])
            elif drafter.needs_hidden:
                ran = fed[number] > 0
                self._has[number, rows] += np.where(ran, prompts, 0)
                self._whole[number, rows] = np.where(ran, self._whole[number, rows] + committed, 0)
                self._holed[number, rows] |= ~ran & (prompts == 0)

    def forget(self, rows: Rows) -> None:
        """Preempted: nothing is cached."""
        self._has[:, rows] = self._whole[:, rows] = 0
        self._holed[:, rows] = False
