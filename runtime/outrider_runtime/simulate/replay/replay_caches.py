"""What each drafter has read of each request: a draft model's prefix, a head's coverage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import Floats
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.draft_caches import UNFILLABLE_GAP_TOKENS
from outrider_runtime.simulate.replay.replay_requests import Books, Rows
from outrider_runtime.simulate.replay.workload import Ints

NOTHING, KV, HIDDEN, BLOCK = range(4)
"""What a drafter needs; a block drafter both, so that it never catches up on a gap."""


class ReplayCaches:
    """Columns over all requests; D drafters in the pool's order."""

    def __init__(self, drafters: Sequence[Drafter], requests: int) -> None:
        shape = (len(drafters), requests)
        self._needs = np.array([_needs(drafter) for drafter in drafters], int)
        self._has: Ints = np.zeros(shape, np.int64)
        """Tokens of the prefix that a draft model or a block drafter has; of a head, of the prompt that it has read."""
        self._whole: Ints = np.zeros(shape, np.int64)
        """Of a head: committed tokens since its last gap."""
        self._holed = np.zeros(shape, bool)

    def columns(self, books: Books, tokens: Ints) -> tuple[Ints, Floats, Ints]:
        """Three (D, N): tokens that are missing, as `Batch` has them; the share of the prompt that was read; committed
        tokens since the last gap. tokens (N,): of the step."""
        return _columns(
            self._needs, self._has, self._whole, self._holed, books.rows, books.context, books.prompt, tokens
        )

    def feed(self, books: Books, fed: Ints, prompts: Ints, committed: Ints) -> None:
        """After a step: fed (D, N) tokens that each drafter ran over, prompts (N,) tokens of prompts in the step,
        committed (N,) tokens by which the context grew. The books are from before it."""
        context = books.context + committed
        _feed(self._needs, self._has, self._whole, self._holed, books.rows, context, fed, prompts, committed)

    def forget(self, rows: Rows) -> None:
        """Preempted: nothing is cached."""
        self._has[:, rows] = self._whole[:, rows] = 0
        self._holed[:, rows] = False


def _needs(drafter: Drafter) -> int:
    if drafter.is_block:
        return BLOCK
    if drafter.needs_kv:
        return KV
    return HIDDEN if drafter.needs_hidden else NOTHING


@compiled
def _columns(
    needs: Ints, has: Ints, whole: Ints, holed: NDArray[np.bool_], rows: Rows, context: Ints, prompt: Ints, tokens: Ints
) -> tuple[Ints, Floats, Ints]:
    shape = (len(needs), len(rows))
    missing, read, since = np.zeros(shape, np.int64), np.ones(shape), np.zeros(shape, np.int64)
    for d in range(len(needs)):
        for i in range(len(rows)):
            row = rows[i]
            since[d, i] = context[i]
            if needs[d] == KV:
                missing[d, i] = context[i] + tokens[i] - has[d, row]
            elif needs[d] == BLOCK:
                missing[d, i] = tokens[i] if has[d, row] >= context[i] else UNFILLABLE_GAP_TOKENS
            elif needs[d] == HIDDEN:
                missing[d, i] = tokens[i]
                seen = min(context[i], prompt[i])
                read[d, i] = has[d, row] / seen if seen else 1.0
                if holed[d, row]:
                    since[d, i] = whole[d, row]
    return missing, read, since


@compiled
def _feed(
    needs: Ints, has: Ints, whole: Ints, holed: NDArray[np.bool_], rows: Rows, context: Ints, fed: Ints, prompts: Ints,
    committed: Ints,
) -> None:  # fmt: skip
    for d in range(len(needs)):
        for i in range(len(rows)):
            row, ran = rows[i], fed[d, i] > 0
            if needs[d] == KV:
                has[d, row] = min(has[d, row] + fed[d, i], context[i])
            elif needs[d] == BLOCK and ran and has[d, row] + committed[i] >= context[i]:
                has[d, row] = context[i]
            elif needs[d] == HIDDEN and ran:
                has[d, row] += prompts[i]
                whole[d, row] += committed[i]
            elif needs[d] == HIDDEN:
                whole[d, row] = 0
                holed[d, row] |= prompts[i] == 0
