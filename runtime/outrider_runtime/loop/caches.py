"""What each drafter of the pool has read, as the columns of `Batch`; and which holes a plan closes. Shapes: D drafters,
N requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.data.batch import Bools, Ints
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.coverage import BlockIds, DraftCoverage, ScheduledTokens

LEAST_CATCH_UP_TOKENS = 2
"""A shorter hole is closed with the token before it: a pass over a single one would be a decoding step's."""


class Hole(NamedTuple):
    """Committed tokens [start, end) of a request that are not in a draft model's KV."""

    drafter: int
    request: int
    """Its place in the step."""
    start: int
    end: int


class Step(NamedTuple):
    """What a step runs over. All (N,)."""

    names: Sequence[str]
    slots: Ints
    context: Ints
    """Tokens before the step's, those under verification counted as accepted."""
    certain: Ints
    """Of these, the tokens that are sure to be committed."""
    prompt: Ints
    """Of the step's tokens, those of prompts."""
    tokens: Ints


class Caches:
    def __init__(self, drafters: Sequence[Drafter], block_size: int, block_ids: BlockIds) -> None:
        self._count = len(drafters)
        self._drafts = {n: DraftCoverage(block_size, block_ids) for n, one in enumerate(drafters) if one.needs_kv}
        self._heads = [n for n, one in enumerate(drafters) if one.needs_hidden]

    @property
    def in_blocks(self) -> bool:
        """Some drafter keeps something in the engine's blocks."""
        return bool(self._drafts)

    def missing(self, step: Step) -> Ints:
        """(D, N) as `Batch.missing`."""
        missing = np.zeros((self._count, len(step.slots)), np.int64)
        for number, draft in self._drafts.items():
            seen = [draft.seen(name, end) for name, end in zip(step.names, step.context.tolist(), strict=True)]
            missing[number] = step.context - np.array(seen, np.int64) + step.tokens
        for number in self._heads:
            missing[number] = step.tokens
        return missing

    def close(self, number: int, step: Step, wanted: Ints, order: Ints, most: int) -> list[Hole]:
        """Holes of draft model `number` that are closed at the end of the step; they count as closed from here on.

        wanted: (N,), tokens of each request from its first missing one on, of those before the step. order: rows, who
        comes first. most: tokens in all.
        """
        draft, closed = self._drafts[number], list[Hole]()
        for row in order.tolist():
            name, context = step.names[row], int(step.context[row])
            seen = draft.seen(name, context)  # more than planned for where one before it closed blocks that both share
            end = min(context, seen + int(wanted[row]))
            if end <= seen or step.certain[row] < context:  # tokens under verification are not known here
                continue
            start = max(0, min(seen, end - LEAST_CATCH_UP_TOKENS))
            if end - start <= most:
                most -= end - start
                closed.append(Hole(number, row, start, end))
                draft.caught_up(name, start, end, context)
        return closed

    def is_whole(self, number: int, step: Step) -> Bools:
        """(N,): nothing of the context is missing."""
        draft = self._drafts[number]
        seen = [draft.seen(name, end) for name, end in zip(step.names, step.context.tolist(), strict=True)]
        return np.array(seen, np.int64) >= step.context

    def ran(self, step: Step, runs: Bools) -> None:
        """The step was scheduled. runs: (D,), the drafters that go with it."""
        for number, draft in self._drafts.items():
            draft.ran(_scheduled(step), neural=bool(runs[number]))

    def missed(self, number: int, step: Step) -> None:
        """Drafter `number` was to run in the step, and did not."""
        if number in self._drafts:
            for tokens in _scheduled(step):
                self._drafts[number].missed(tokens.request_id, tokens.certain)

    def left_open(self, holes: Iterable[Hole], names: Sequence[str]) -> None:
        """These were to be closed, and were not."""
        for hole in holes:
            self._drafts[hole.drafter].missed(names[hole.request], hole.start)

    def lost(self, number: int, name: str) -> None:
        """Drafter `number` has nothing left of a request."""
        if number in self._drafts:
            self._drafts[number].missed(name, 0)

    def allocated(self, blocks: Sequence[int]) -> None:
        """These blocks are new: what they held is gone."""
        for draft in self._drafts.values():
            draft.allocated(blocks)

    def forget(self, name: str) -> None:
        """The request has ended or was preempted; its blocks may live on in the prefix cache."""
        for draft in self._drafts.values():
            draft.forget(name)


def _scheduled(step: Step) -> list[ScheduledTokens]:
    columns = (step.context.tolist(), step.tokens.tolist(), (step.context - step.certain).tolist())
    return [ScheduledTokens(name, *values) for name, *values in zip(step.names, *columns, strict=True)]
