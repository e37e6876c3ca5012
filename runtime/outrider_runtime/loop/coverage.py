"""Which tokens of each request a draft's own KV covers (TurboSpec, section 4.2). Columns by slot; N requests of a step.

The draft's KV lies in the same blocks as the target's. A step that skips the draft leaves a gap in the KV of every
request of the step, and in blocks that the prefix cache may hand to later requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.data.batch import Bools, Ints

BlockIds = Callable[[str, int, int], Sequence[int]]
"""`(request, first, last)`: physical blocks of the draft's KV in blocks first..last of a request, `NOT_KEPT` for one
that its window has passed. Several for each where its layers lie in several KV groups; none where that is unknown."""

NOT_KEPT = -1
"""Stands for a block that no later token attends to."""

UNKNOWN = -1
"""The slot's request has not run since it entered: what the prefix cache gave it decides."""


class ScheduledStep(NamedTuple):
    """The tokens that a step runs over. All columns (N,)."""

    names: Sequence[str]
    slots: Ints
    context: Ints
    """Tokens before the step's, those under verification counted as accepted."""
    certain: Ints
    """Tokens among `context` that are sure to be committed."""
    prompt: Ints
    """Prompt tokens among the step's."""
    tokens: Ints


class DraftCoverage:
    """The coverage of one draft model.

    Proposals over a gap would be junk, and so would the KV that the draft writes behind one: a gap reaches to the end
    of the request until the draft has run over all that it misses.
    """

    def __init__(self, slots: int, block_size: int, block_ids: BlockIds) -> None:
        self._block_size = block_size
        self._block_ids = block_ids
        self._seen = np.full(slots, UNKNOWN, np.int64)
        """(slots,): tokens from the request's start that the draft has seen."""
        self._valid: set[int] = set()
        """Blocks whose written tokens all went through the draft."""
        self._catch_ups = 0
        self._looked_at = np.zeros(slots, np.int64)
        """(slots,): catch-ups that were over when the slot's next block was looked up: only they make shared blocks
        valid."""
        self._stale = np.zeros((2, slots), np.int64)
        """(2, slots): the first and one past the last block of the request that a gap has made invalid already. A plain
        step asks for a request's blocks only when it leaves this range, once in `block_size` tokens."""

    def seen(self, step: ScheduledStep) -> Ints:
        """(N,): tokens from the beginning of each request's context that the draft has seen; all of them where it is
        ready to be drafted for."""
        size, slots = self._block_size, step.slots
        seen = self._seen[slots]
        for row in np.flatnonzero(seen == UNKNOWN).tolist():
            seen[row] = self._cached(step.names[row], int(step.context[row]))
        # Another request may have caught up on blocks that both share.
        at_block = (seen % size == 0) & (seen + size <= step.context)
        for row in np.flatnonzero(at_block & (self._looked_at[slots] < self._catch_ups)).tolist():
            seen[row] = self._shared(step.names[row], int(seen[row]), int(step.context[row]))
        self._looked_at[slots] = self._catch_ups
        known = self._seen[slots] != UNKNOWN
        self._seen[slots[known]] = seen[known]
        return np.minimum(seen, step.context)

    def ran(self, step: ScheduledStep, *, neural: bool) -> None:
        """The step was scheduled; `neural`: the draft's forward goes with it."""
        fresh = self._seen[step.slots] == UNKNOWN
        self._write(step_rows(step, np.flatnonzero(~fresh)), neural=neural)
        # A request that enters may share blocks that one before it writes in this very step.
        for row in np.flatnonzero(fresh):
            self._write(step_rows(step, np.array([row])), neural=neural)

    def _write(self, step: ScheduledStep, *, neural: bool) -> None:
        # Tokens behind the context that were seen before were rejected proposals: they are written again.
        seen = self.seen(step)
        whole = np.full(len(seen), neural) & (seen == step.context)
        end = step.context + step.tokens
        self._seen[step.slots] = np.where(whole, end, np.minimum(seen, step.certain))
        self._stale[:, step.slots[whole]] = 0
        self._mark_valid(step, whole)
        self._mark_invalid(step, ~whole)

    def caught_up(self, name: str, slot: int, start: int, end: int, context: int) -> None:
        """The draft runs over tokens [start, end) of the request's first `context`; it had seen those before."""
        self._seen[slot] = end
        self._stale[:, slot] = 0
        # The last block is whole as far as it is written where the gap is closed, else not yet.
        last = (end - 1) // self._block_size if end == context else end // self._block_size - 1
        if start // self._block_size <= last:
            self._catch_ups += 1
            self._valid.update(self._block_ids(name, start // self._block_size, last))

    def allocated(self, blocks: Iterable[int]) -> None:
        """These blocks are new: what they held is gone."""
        self._valid.difference_update(blocks)

    def missed(self, name: str, slot: int, start: int) -> None:
        """The draft was to run over tokens from `start` on, and did not."""
        if self._seen[slot] != UNKNOWN:
            self._seen[slot] = min(int(self._seen[slot]), start)
            self._valid.difference_update(self._block_ids(name, start // self._block_size, sys.maxsize - 1))

    def forget(self, slot: int) -> None:
        """The request has finished or was preempted; its blocks may live on in the prefix cache."""
        self._seen[slot] = UNKNOWN
        self._stale[:, slot] = 0

    def _shared(self, name: str, seen: int, context: int) -> int:
        while seen + self._block_size <= context:
            index = seen // self._block_size
            if not self._is_valid(name, index, index):
                break
            seen += self._block_size
        return seen

    def _cached(self, name: str, context: int) -> int:
        """Tokens from the beginning of a context out of the prefix cache that the draft has seen."""
        if context == 0 or self._is_valid(name, 0, (context - 1) // self._block_size):
            return context
        seen = 0
        while seen < context and self._is_valid(name, seen // self._block_size, seen // self._block_size):
            seen += self._block_size
        return min(context, seen)

    def _is_valid(self, name: str, first: int, last: int) -> bool:
        """Whether all tokens that were written to blocks first..last of a request went through the draft."""
        blocks = self._block_ids(name, first, last)
        return bool(blocks) and self._valid.issuperset(block for block in blocks if block != NOT_KEPT)

    def _mark_valid(self, step: ScheduledStep, rows: Bools) -> None:
        # A block that was begun in an earlier step keeps its bit: it is as whole as its beginning.
        begun = -(-step.context // self._block_size)
        last = (step.context + step.tokens - 1) // self._block_size
        for row in np.flatnonzero(rows & (begun <= last)).tolist():
            self._valid.update(self._block_ids(step.names[row], int(begun[row]), int(last[row])))

    def _mark_invalid(self, step: ScheduledStep, rows: Bools) -> None:
        first = step.context // self._block_size
        last = (step.context + step.tokens - 1) // self._block_size
        stale_first, stale_end = self._stale[:, step.slots]
        for row in np.flatnonzero(rows & ((first < stale_first) | (last >= stale_end))).tolist():
            blocks = int(first[row]), int(last[row])
            self._valid.difference_update(self._block_ids(step.names[row], *blocks))
            self._extend_stale(int(step.slots[row]), *blocks)

    def _extend_stale(self, slot: int, first: int, last: int) -> None:
        stale_first, stale_end = self._stale[:, slot].tolist()
        if stale_first <= first <= stale_end:
            self._stale[1, slot] = max(stale_end, last + 1)
        else:
            self._stale[:, slot] = first, last + 1


def step_rows(step: ScheduledStep, rows: Ints) -> ScheduledStep:
    """The step of some of its requests: `rows` (N',) are their places in it."""
    names = step.names if len(rows) == len(step.names) else [step.names[row] for row in rows.tolist()]
    return ScheduledStep(names, *(column[rows] for column in step[1:]))
