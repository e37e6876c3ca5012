"""Tokens of each request that a draft model's own KV covers (TurboSpec, section 4.2). Columns by slot; N requests.

The draft's KV lies in the same blocks as the target's. A step without the draft leaves a KV gap in each of its
requests, and in blocks that the prefix cache may give to later requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Bools, Ints

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
        size, slots = self._block_size, step.slots
        seen = self._seen[slots]
        for row in np.flatnonzero(seen == UNKNOWN).tolist():
            seen[row] = self._cached(step.names[row], int(step.context[row]))
        # Another request may have caught up on blocks that both share.
        at_block = (seen % size == 0) & (seen + size <= step.context)
        for row in np.flatnonzero(at_block & (self._catch_ups_at_lookup[slots] < self._catch_ups)).tolist():
            seen[row] = self._shared(step.names[row], int(seen[row]), int(step.context[row]))
        self._catch_ups_at_lookup[slots] = self._catch_ups
        known = self._seen[slots] != UNKNOWN
        self._seen[slots[known]] = seen[known]
        return np.minimum(seen, step.context)

    def ran(self, step: ScheduledStep, *, neural: bool) -> None:
        """Update coverage for a scheduled step. neural: whether the draft's forward pass runs with it."""
        fresh = self._seen[step.slots] == UNKNOWN
        self._write(step_rows(step, np.flatnonzero(~fresh)), neural=neural)
        # A new request may share blocks that a request before it writes in this step.
        for row in np.flatnonzero(fresh):
            self._write(step_rows(step, np.array([row])), neural=neural)

    def _write(self, step: ScheduledStep, *, neural: bool) -> None:
        # Covered tokens behind the context were rejected proposals: they are written again.
        seen = self.seen(step)
        whole = np.full(len(seen), neural) & (seen == step.context)
        end = step.context + step.tokens
        self._seen[step.slots] = np.where(whole, end, np.minimum(seen, step.certain))
        self._stale[:, step.slots[whole]] = 0
        self._mark_valid(step, whole)
        self._mark_invalid(step, ~whole)

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

    def _mark_valid(self, step: ScheduledStep, rows: Bools) -> None:
        # A block that an earlier step began keeps its state: it is valid if its first tokens are.
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
    """Select rows (N',) of a step."""
    names = step.names if len(rows) == len(step.names) else [step.names[row] for row in rows.tolist()]
    return ScheduledStep(names, *(column[rows] for column in step[1:]))
