"""Whether the neural draft's KV covers a request without a hole (design, section 5, Draft-prefill gate).

The draft's KV lies in the same blocks as the target's. A step that skips the draft's forward leaves a hole in every
request of the step, and in blocks that the prefix cache may hand to later requests. Proposals over a hole would be
junk, so such a request is not drafted for by the draft model again (EAGLE heads: see `scheduler.holes_matter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class ScheduledTokens(NamedTuple):
    """Tokens [start, start + length) of one request run in a step."""

    request_id: str
    start: int
    length: int


class DraftCoverage:
    def __init__(self, block_size: int, block_ids: Callable[[str, int, int], Sequence[int]]) -> None:
        """`block_ids(request, first, last)`: physical blocks first..last of a request, in order of its tokens."""
        self._block_size = block_size
        self._block_ids = block_ids
        self._whole: dict[str, int] = {}  # request -> tokens from its start that the draft has seen
        self._valid: set[int] = set()  # blocks whose written tokens all went through the draft

    def ready(self, request_id: str, start: int) -> bool:
        """The draft has seen each of the request's first `start` tokens."""
        return self._covered(request_id, start) >= start

    def ran(self, scheduled: Iterable[ScheduledTokens], *, neural: bool) -> None:
        """A step was scheduled; `neural`: the draft's forward goes with it."""
        for tokens in scheduled:
            covered = self._covered(tokens.request_id, tokens.start)
            whole = neural and covered >= tokens.start
            # Tokens after `start` that were covered before were rejected proposals: they are written again.
            self._whole[tokens.request_id] = tokens.start + tokens.length if whole else min(covered, tokens.start)
            self._mark(tokens, whole=whole)

    def forget(self, request_id: str) -> None:
        """The request has finished or was preempted; its blocks may live on in the prefix cache."""
        self._whole.pop(request_id, None)

    def _covered(self, request_id: str, start: int) -> int:
        covered = self._whole.get(request_id)
        return self._cached(request_id, start) if covered is None else covered

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
