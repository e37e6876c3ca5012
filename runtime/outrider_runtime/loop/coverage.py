"""What a drafter's own KV covers of each request (TurboSpec, section 4.2).

It lies in the same blocks as the target's. A step that skips the drafter leaves a hole in every request of the step,
and in blocks that the prefix cache may hand to later requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

BlockIds = Callable[[str, int, int], Sequence[int]]
"""`(request, first, last)`: physical blocks first..last of a request, in order of its tokens."""


class ScheduledTokens(NamedTuple):
    """Tokens [start, start + length) of one request run in a step."""

    request_id: str
    start: int
    length: int
    unsure: int = 0
    """Of the tokens before `start`: proposals under verification, counted as accepted (asynchronous scheduling)."""

    @property
    def certain(self) -> int:
        return self.start - self.unsure


class DraftCoverage:
    """A draft model's. Proposals over a hole would be junk, and what it writes behind one is junk, too: a hole reaches
    to the end of the request, until the draft runs over all that it misses."""

    def __init__(self, block_size: int, block_ids: BlockIds) -> None:
        self._block_size = block_size
        self._block_ids = block_ids
        self._seen: dict[str, int] = {}  # request -> tokens from its start that the draft has seen
        self._valid: set[int] = set()  # blocks whose written tokens all went through the draft

    def seen(self, request_id: str, start: int) -> int:
        """Of the request's first `start` tokens, how many from the beginning on the draft has seen: all, if it is ready
        to be drafted for."""
        seen = self._seen.get(request_id)
        if seen is None:
            return self._cached(request_id, start)
        # Another request may have closed the hole in blocks that both share.
        while seen % self._block_size == 0 and seen + self._block_size <= start and self._is_valid(request_id, seen):
            seen += self._block_size
            self._seen[request_id] = seen
        return min(seen, start)

    def ran(self, scheduled: Iterable[ScheduledTokens], *, neural: bool) -> None:
        """A step was scheduled; `neural`: the draft's forward goes with it."""
        for tokens in scheduled:
            # Tokens after `start` that were seen before were rejected proposals: they are written again.
            seen = self.seen(tokens.request_id, tokens.start)
            whole = neural and seen == tokens.start
            end = tokens.start + tokens.length
            self._seen[tokens.request_id] = end if whole else min(seen, tokens.certain)
            self._mark(tokens, whole=whole)

    def caught_up(self, request_id: str, start: int, end: int, context: int) -> None:
        """The draft runs over tokens [start, end) of the request's first `context`; it had seen those before."""
        self._seen[request_id] = end
        # The last block is whole as far as it is written where the hole is closed, else not yet.
        last = (end - 1) // self._block_size if end == context else end // self._block_size - 1
        if start // self._block_size <= last:
            self._valid.update(self._block_ids(request_id, start // self._block_size, last))

    def allocated(self, blocks: Iterable[int]) -> None:
        """These blocks are new: what they held is gone."""
        self._valid.difference_update(blocks)

    def missed(self, request_id: str, start: int) -> None:
        """The draft was to run over tokens from `start` on, and did not."""
        if request_id in self._seen:
            self._seen[request_id] = min(self._seen[request_id], start)
            self._valid.difference_update(self._block_ids(request_id, start // self._block_size, sys.maxsize - 1))

    def forget(self, request_id: str) -> None:
        """The request has finished or was preempted; its blocks may live on in the prefix cache."""
        self._seen.pop(request_id, None)

    def _is_valid(self, request_id: str, start: int) -> bool:
        index = start // self._block_size
        return not self._valid.isdisjoint(self._block_ids(request_id, index, index))

    def _cached(self, request_id: str, start: int) -> int:
        """Of `start` tokens that came from the prefix cache: how many from the beginning the draft has seen."""
        if start == 0:
            return 0
        blocks = self._block_ids(request_id, 0, (start - 1) // self._block_size)
        for index, block in enumerate(blocks):
            if block not in self._valid:
                return index * self._block_size
        return min(start, len(blocks) * self._block_size)

    def _mark(self, tokens: ScheduledTokens, *, whole: bool) -> None:
        first = tokens.start // self._block_size
        last = (tokens.start + tokens.length - 1) // self._block_size
        if not whole:
            self._valid.difference_update(self._block_ids(tokens.request_id, first, last))
            return
        # A block that was begun in an earlier step keeps its bit: it is as whole as its beginning.
        begun = first if tokens.start % self._block_size == 0 else first + 1
        if begun <= last:
            self._valid.update(self._block_ids(tokens.request_id, begun, last))
