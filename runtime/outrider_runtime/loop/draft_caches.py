"""What each drafter of the pool has read, as the columns of `Batch`; and which holes a plan closes. Shapes: D drafters,
N requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.data.batch import Bools, Ints
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.coverage import DraftCoverage, ScheduledStep, step_rows

LEAST_CATCH_UP_TOKENS = 2
"""A shorter hole is closed with the token before it: a pass over a single one would be a decoding step's."""


UNFILLABLE_GAP_TOKENS = 1 << 30
"""Missing where a block drafter's cache has a gap: more than any step feeds, since hidden states are gone."""


DrafterBlockIds = Callable[[int, str, int, int], Sequence[int]]
"""Number of a drafter -> its `BlockIds`, as one function."""


class KVGap(NamedTuple):
    """Committed tokens [start, end) of a request that are not in a draft model's KV."""

    drafter: int
    request: int
    """Its place in the step."""
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
        self._heads = [number for number, drafter in enumerate(drafters) if drafter.needs_hidden]

    @property
    def in_blocks(self) -> bool:
        """Some drafter keeps something in the engine's blocks."""
        return bool(self._drafts)

    def missing(self, step: ScheduledStep) -> Ints:
        """(D, N) as `Batch.missing`."""
        missing = np.zeros((self._count, len(step.slots)), np.int64)
        for number, draft in self._drafts.items():
            missing[number] = step.context - draft.seen(step) + step.tokens
        for number in self._heads:
            gap = missing[number] > step.tokens  # of a block drafter
            missing[number] = np.where(gap, UNFILLABLE_GAP_TOKENS, step.tokens)
        return missing

    def close(self, number: int, step: ScheduledStep, wanted: Ints, order: Ints, most: int) -> list[KVGap]:
        """Holes of draft model `number` that are closed at the end of the step; they count as closed from here on.

        wanted: (N,), tokens of each request from its first missing one on, of those before the step. order: rows, who
        comes first. most: tokens in all.
        """
        draft, closed = self._drafts[number], list[KVGap]()
        for row in order[wanted[order] > 0].tolist():
            name, slot, context = step.names[row], int(step.slots[row]), int(step.context[row])
            # More than planned for where a request before it caught up on blocks that both share.
            seen = int(draft.seen(step_rows(step, np.array([row])))[0])
            end = min(context, seen + int(wanted[row]))
            if end <= seen or step.certain[row] < context:  # tokens under verification are not known here
                continue
            start = max(0, min(seen, end - LEAST_CATCH_UP_TOKENS))
            if end - start <= most:
                most -= end - start
                closed.append(KVGap(number, row, start, end))
                draft.caught_up(name, slot, start, end, context)
        return closed

    def is_whole(self, number: int, step: ScheduledStep) -> Bools:
        """(N,): nothing of the context is missing."""
        return self._drafts[number].seen(step) >= step.context

    def ran(self, step: ScheduledStep, runs: Bools) -> None:
        """The step was scheduled. runs: (D,), the drafters that go with it."""
        for number, draft in self._drafts.items():
            draft.ran(step, neural=bool(runs[number]))

    def missed(self, number: int, step: ScheduledStep) -> None:
        """Drafter `number` was to run in the step, and did not."""
        if number in self._drafts:
            for name, slot, certain in zip(step.names, step.slots.tolist(), step.certain.tolist(), strict=True):
                self._drafts[number].missed(name, slot, certain)

    def left_open(self, holes: Iterable[KVGap], step: ScheduledStep) -> None:
        """These were to be closed, and were not. `request` is the row of the step."""
        for hole in holes:
            self._drafts[hole.drafter].missed(step.names[hole.request], int(step.slots[hole.request]), hole.start)

    def lost(self, number: int, name: str, slot: int) -> None:
        """Drafter `number` has nothing left of a request."""
        if number in self._drafts:
            self._drafts[number].missed(name, slot, 0)

    def allocated(self, blocks: Sequence[int]) -> None:
        """These blocks are new: what they held is gone."""
        for draft in self._drafts.values():
            draft.allocated(blocks)

    def forget(self, slot: int) -> None:
        """The slot's request has ended or was preempted; its blocks may live on in the prefix cache."""
        for draft in self._drafts.values():
            draft.forget(slot)
