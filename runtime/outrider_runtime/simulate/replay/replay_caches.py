"""Tokens of each request that drafters' caches cover: the prefix of a draft model, the coverage of a head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import Floats
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.draft_caches import UNFILLABLE_GAP_TOKENS
from outrider_runtime.simulate.replay.replay_requests import RequestStates, Rows
from outrider_runtime.simulate.replay.workload import Ints

NOTHING, KV, HIDDEN, BLOCK = range(4)
"""Inputs that a drafter needs. A block drafter needs both, so it never fills a gap."""


class ReplayCaches:
    """Columns over all requests; D drafters in the pool's order."""

    def __init__(self, drafters: Sequence[Drafter], requests: int) -> None:
        shape = (len(drafters), requests)
        self._needs = np.array([_needs(drafter) for drafter in drafters], int)
        self._has: Ints = np.zeros(shape, np.int64)
        """Prefix tokens that a draft model covers; prompt tokens that a head has read."""
        self._whole: Ints = np.zeros(shape, np.int64)
        """Committed tokens since the last gap of a head."""
        self._has_gap = np.zeros(shape, bool)
        """Whether a head or a block drafter has missed tokens. It does not follow from a length: while steps are in
        flight the scheduler counts proposals as accepted, and is ahead of every cache."""

    def columns(self, states: RequestStates, tokens: Ints) -> tuple[Ints, Floats, Ints]:
        """Return three (D, N): missing tokens (`Batch.missing`), read share of the prompt, committed tokens since a
        gap.

        tokens: (N,), tokens of the step.
        """
        return _columns(
            self._needs, self._has, self._whole, self._has_gap, states.rows, states.context, states.prompt, tokens
        )

    def feed(self, states: RequestStates, fed: Ints, prompts: Ints, committed: Ints) -> None:
        """Update the caches after a step.

        states: from before the step. fed: (D, N), tokens that each drafter processed. prompts: (N,), prefill tokens of
        the step. committed: (N,), growth of the context.
        """
        context = states.context + committed
        _feed(self._needs, self._has, self._whole, self._has_gap, states.rows, context, fed, prompts, committed)

    def forget(self, rows: Rows) -> None:
        """Forget preempted requests."""
        self._has[:, rows] = self._whole[:, rows] = 0
        self._has_gap[:, rows] = False


def _needs(drafter: Drafter) -> int:
    if drafter.is_block:
        return BLOCK
    if drafter.needs_kv:
        return KV
    return HIDDEN if drafter.needs_hidden else NOTHING


@compiled
def _columns(
    needs: Ints,
    has: Ints,
    whole: Ints,
    has_gap: NDArray[np.bool_],
    rows: Rows,
    context: Ints,
    prompt: Ints,
    tokens: Ints,
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
                missing[d, i] = UNFILLABLE_GAP_TOKENS if has_gap[d, row] else tokens[i]
            elif needs[d] == HIDDEN:
                missing[d, i] = tokens[i]
                seen = min(context[i], prompt[i])
                read[d, i] = has[d, row] / seen if seen else 1.0
                if has_gap[d, row]:
                    since[d, i] = whole[d, row]
    return missing, read, since


@compiled
def _feed(
    needs: Ints, has: Ints, whole: Ints, has_gap: NDArray[np.bool_], rows: Rows, context: Ints, fed: Ints,
    prompts: Ints, committed: Ints,
) -> None:  # fmt: skip
    for d in range(len(needs)):
        for i in range(len(rows)):
            row, ran = rows[i], fed[d, i] > 0
            if needs[d] == KV:
                has[d, row] = min(has[d, row] + fed[d, i], context[i])
            elif needs[d] == BLOCK:
                has_gap[d, row] |= not ran
            elif needs[d] == HIDDEN and ran:
                has[d, row] += prompts[i]
                whole[d, row] += committed[i]
            elif needs[d] == HIDDEN:
                whole[d, row] = 0
                has_gap[d, row] |= prompts[i] == 0
