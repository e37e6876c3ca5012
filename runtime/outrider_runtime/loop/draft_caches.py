"""KV gaps of each drafter's cache, as columns of `Batch`, and the gaps that a plan fills.

Shapes: D drafters, N requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Bools, Ints
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.coverage import DraftCoverage, ScheduledStep, step_rows

MIN_CATCH_UP_TOKENS = 2
"""A one-token gap is filled together with the token before it: a pass over one token would be a decoding step."""

UNFILLABLE_GAP_TOKENS = 1 << 30
"""Reported for a block drafter's KV gap, which cannot be filled: the hidden states that it needs are gone."""

DrafterBlockIds = Callable[[int, str, int, int], Sequence[int]]
"""`BlockIds` with the drafter's number as first argument."""


class KVGap(NamedTuple):
    """Tokens [start, end) of a request that are missing in a draft model's KV cache. The last ones may still be under
    verification."""

    drafter: int
    request: int
    """Row of the request in the step."""
    start: int
    end: int


class DraftCaches:
    def __init__(self, drafters: Sequence[Drafter], slots: int, block_size: int, block_ids: DrafterBlockIds) -> None:
        self._count = len(drafters)
        self._drafts = {
            number: DraftCoverage(slots, block_size, partial(block_ids, number))
            for number, drafter in enumerate(drafters)
            if drafter.needs_kv
        }
        self.reads = np.array([drafter.reads for drafter in drafters], bool)
        """(D,): see `settings.Drafter`."""
        self._heads = [number for number, drafter in enumerate(drafters) if drafter.needs_hidden]

    @property
    def with_kv(self) -> Iterable[int]:
        """Numbers of the drafters with KV of their own."""
        return self._drafts

    def missing(self, step: ScheduledStep) -> Ints:
        """(D, N): tokens that each drafter's cache lacks, as `Batch.missing`."""
        missing = np.zeros((self._count, len(step.slots)), np.int64)
        for number, draft in self._drafts.items():
            missing[number] = step.context - draft.seen(step) + step.tokens
        for number in self._heads:
            gap = missing[number] > step.tokens if number in self._drafts else None  # of a block drafter
            missing[number] = step.tokens
            if gap is not None:
                missing[number, gap] = UNFILLABLE_GAP_TOKENS
        return missing

    def fill(
        self, number: int, step: ScheduledStep, catch_up_tokens: Ints, row_order: Ints, max_tokens: int
    ) -> list[KVGap]:
        """Choose the KV gaps of draft model `number` that are filled at the end of the step, and count them as filled.

        catch_up_tokens: (N,), planned for each request, from its first missing token on. row_order: rows by priority.
        max_tokens: limit over all requests.
        """
        draft, filled = self._drafts[number], list[KVGap]()
        for row in row_order[catch_up_tokens[row_order] > 0].tolist():
            name, slot, context = step.names[row], int(step.slots[row]), int(step.context[row])
            # A request before it may have caught up on blocks that both share, so more is covered than was planned for.
            seen = int(draft.seen(step_rows(step, np.array([row])))[0])
            end = min(context, seen + int(catch_up_tokens[row]))
            if end <= seen:
                continue
            start = max(0, min(seen, end - MIN_CATCH_UP_TOKENS))
            if end - start <= max_tokens:
                max_tokens -= end - start
                filled.append(KVGap(number, row, start, end))
                draft.caught_up(name, slot, start, end, context)
        return filled

    def is_whole(self, number: int, step: ScheduledStep) -> Bools:
        """(N,): requests whose context the drafter's cache covers."""
        return self._drafts[number].seen(step) >= step.context

    def ran(self, step: ScheduledStep, runs: Bools) -> None:
        """Update coverage for a scheduled step. runs: (D,), the drafters that run with it."""
        for number, draft in self._drafts.items():
            draft.ran(step, neural=bool(runs[number]))

    def missed(self, number: int, step: ScheduledStep) -> None:
        """Take back the coverage of a step in which drafter `number` did not run as planned."""
        if number in self._drafts:
            for name, slot, certain in zip(step.names, step.slots.tolist(), step.certain.tolist(), strict=True):
                self._drafts[number].missed(name, slot, certain)

    def not_filled(self, gaps: Iterable[KVGap], step: ScheduledStep) -> None:
        """Take back gaps that were not filled as planned; `request` is the row of the step."""
        for gap in gaps:
            self._drafts[gap.drafter].missed(step.names[gap.request], int(step.slots[gap.request]), gap.start)

    def lost(self, number: int, name: str, slot: int) -> None:
        """Forget all that drafter `number` cached of a request."""
        if number in self._drafts:
            self._drafts[number].missed(name, slot, 0)

    def allocated(self, blocks: Sequence[int]) -> None:
        """Invalidate newly allocated blocks: their former contents are gone."""
        for draft in self._drafts.values():
            draft.allocated(blocks)

    def forget(self, slot: int) -> None:
        """Forget the slot's request, which ended or was preempted; its blocks may stay in the prefix cache."""
        for draft in self._drafts.values():
            draft.forget(slot)
