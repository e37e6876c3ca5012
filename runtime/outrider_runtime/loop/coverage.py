"""Tokens of each request that a draft model's own KV covers (TurboSpec, section 4.2). Columns by slot; N requests.

The draft's KV lies in the same blocks as the target's. A step without the draft leaves a KV gap in each of its
requests, and in blocks that the prefix cache may give to later requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Ints
from outrider_runtime.control.compiled import compiled

BlockIds = Callable[[str, int, int], Sequence[int]]
"""`(request, first, last)`: physical blocks of the draft's KV in blocks first..last of a request.

A block that the draft's window has passed is `NOT_KEPT`. A block occurs once for each KV group that the draft's layers
lie in. The result is empty if the blocks are unknown.
"""

NOT_KEPT = -1
"""Stands for a block that no later token attends to."""

UNKNOWN = -1
"""Coverage of a request that has not run yet: the blocks from the prefix cache decide it."""


class ScheduledStep(NamedTuple):
    """The tokens that a step processes. All columns (N,)."""

    names: Sequence[str]
    slots: Ints
    context: Ints
    """Tokens before the step; tokens under verification count as accepted."""
    certain: Ints
    """Tokens among `context` that are committed for sure."""
    prompt: Ints
    """Prefill tokens among `tokens`."""
    tokens: Ints
    """Tokens that the step computes."""


class DraftCoverage:
    """The coverage of one draft model.

    Proposals over a gap are useless, and so is the KV that the draft writes behind it. So a gap reaches to the end of
    the request until the draft has caught up.
    """

    def __init__(self, slots: int, block_size: int, block_ids: BlockIds) -> None:
        self._block_size = block_size
        self._block_ids = block_ids
        self._seen = np.full(slots, UNKNOWN, np.int64)
        """(slots,): tokens from the request's start that the draft covers."""
        self._valid: set[int] = set()
        """Blocks whose tokens the draft has all processed."""
        self._catch_ups = 0
        self._catch_ups_at_lookup = np.zeros(slots, np.int64)
        """(slots,): catch-ups so far when the slot's next block was looked up. Only a catch-up makes a shared block
        valid."""
        self._stale = np.zeros((2, slots), np.int64)
        """(2, slots): first and one past the last block of the request that a gap has invalidated already.

        A plain step looks up a request's blocks only when it leaves this range, once in `block_size` tokens.
        """

    def seen(self, step: ScheduledStep) -> Ints:
        """(N,): tokens from the start of each request's context that the draft covers; equal to the context if the
        draft can propose for the request."""
        size = self._block_size
        seen, unknown = covered(step.slots, step.context, self._seen, self._catch_ups_at_lookup, self._catch_ups, size)
        for row in unknown.tolist():
            name, context = step.names[row], int(step.context[row])
            if seen[row] == UNKNOWN:
                seen[row] = self._cached(name, context)
            else:
                seen[row] = self._seen[step.slots[row]] = self._shared(name, int(seen[row]), context)
        return np.minimum(seen, step.context)

    def ran(self, step: ScheduledStep, *, neural: bool) -> None:
        """Update coverage for a scheduled step. neural: whether the draft's forward pass runs with it."""
        fresh = self._seen[step.slots] == UNKNOWN
        if not fresh.any():
            self._write(step, neural=neural)
            return
        self._write(step_rows(step, np.flatnonzero(~fresh)), neural=neural)
        # A new request may share blocks that a request before it writes in this step.
        for row in np.flatnonzero(fresh):
            self._write(step_rows(step, np.array([row])), neural=neural)

    def _write(self, step: ScheduledStep, *, neural: bool) -> None:
        columns = step.slots, step.context, step.certain, step.tokens
        valid, invalid = advance(columns, self.seen(step), neural, self._block_size, self._seen, self._stale)
        for row, first, last in valid.tolist():
            self._valid.update(self._block_ids(step.names[row], first, last))
        for row, first, last in invalid.tolist():
            self._valid.difference_update(self._block_ids(step.names[row], first, last))

    def caught_up(self, name: str, slot: int, start: int, end: int, context: int) -> None:
        """Count tokens [start, end) of the request's first `context` as covered; those before are already."""
        self._seen[slot] = end
        self._stale[:, slot] = 0
        # The last block is valid if the gap is filled up to the context, else not yet.
        last = (end - 1) // self._block_size if end == context else end // self._block_size - 1
        if start // self._block_size <= last:
            self._catch_ups += 1
            self._valid.update(self._block_ids(name, start // self._block_size, last))

    def allocated(self, blocks: Iterable[int]) -> None:
        """Invalidate newly allocated blocks: their former contents are gone."""
        self._valid.difference_update(blocks)

    def missed(self, name: str, slot: int, start: int) -> None:
        """Take back coverage from token `start` on: the draft did not run as planned."""
        if self._seen[slot] != UNKNOWN:
            self._seen[slot] = min(int(self._seen[slot]), start)
            self._valid.difference_update(self._block_ids(name, start // self._block_size, sys.maxsize - 1))

    def forget(self, slot: int) -> None:
        """Forget a request that ended or was preempted; its blocks may stay in the prefix cache."""
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
        """Count the tokens from the start of a prefix-cached context that the draft covers."""
        if context == 0 or self._is_valid(name, 0, (context - 1) // self._block_size):
            return context
        seen = 0
        while seen < context and self._is_valid(name, seen // self._block_size, seen // self._block_size):
            seen += self._block_size
        return min(context, seen)

    def _is_valid(self, name: str, first: int, last: int) -> bool:
        """Return whether the draft has processed all tokens in blocks first..last of a request."""
        blocks = self._block_ids(name, first, last)
        return bool(blocks) and self._valid.issuperset(block for block in blocks if block != NOT_KEPT)


@compiled
def covered(
    slots: Ints, context: Ints, seen_of_slot: Ints, looked_up: Ints, catch_ups: int, size: int
) -> tuple[Ints, Ints]:  # fmt: skip
    """(N,): covered tokens as the columns know them, and the rows whose next blocks must be looked up: those of new
    requests, and, after a catch-up, those that may share blocks with the request that caught up.

    looked_up: (slots,), `catch_ups` at the last lookup of each slot; updated."""
    seen, rows, count = seen_of_slot[slots], np.empty(len(slots), np.int64), 0
    for i in range(len(slots)):
        at_block = seen[i] % size == 0 and seen[i] + size <= context[i]
        if seen[i] == UNKNOWN or (at_block and looked_up[slots[i]] < catch_ups):
            rows[count] = i
            count += 1
        looked_up[slots[i]] = catch_ups
    return seen, rows[:count]


@compiled
def advance(
    step: tuple[Ints, Ints, Ints, Ints], seen: Ints, neural: bool, size: int, seen_of_slot: Ints, stale: Ints
) -> tuple[Ints, Ints]:  # fmt: skip
    """Cover a scheduled step. Returns rows of (request, first block, last block): blocks that become valid, and those
    that become invalid and were not yet.

    A block that an earlier step began keeps its state: it is valid if its first tokens are. Covered tokens behind the
    context were rejected proposals: they are written again. step: slots, context, certain and tokens of a
    `ScheduledStep`. seen: (N,). seen_of_slot, stale: updated."""
    slots, context, certain, tokens = step
    blocks, counts = np.empty((2, len(slots), 3), np.int64), np.zeros(2, np.int64)
    for i in range(len(slots)):
        slot, end, whole = slots[i], context[i] + tokens[i], neural and seen[i] == context[i]
        seen_of_slot[slot] = end if whole else min(seen[i], certain[i])
        first, last = context[i] // size, (end - 1) // size
        if whole:
            stale[0, slot], stale[1, slot], first = 0, 0, -(-context[i] // size)
        if first <= last if whole else (first < stale[0, slot] or last >= stale[1, slot]):
            row = 0 if whole else 1
            blocks[row, counts[row], 0], blocks[row, counts[row], 1], blocks[row, counts[row], 2] = i, first, last
            counts[row] += 1
        if not whole and stale[0, slot] <= first <= stale[1, slot]:
            stale[1, slot] = max(stale[1, slot], last + 1)
        elif not whole:
            stale[0, slot], stale[1, slot] = first, last + 1
    return blocks[0, : counts[0]], blocks[1, : counts[1]]


def step_rows(step: ScheduledStep, rows: Ints) -> ScheduledStep:
    """Select rows (N',) of a step."""
    names = step.names if len(rows) == len(step.names) else [step.names[row] for row in rows.tolist()]
    return ScheduledStep(names, *(column[rows] for column in step[1:]))
