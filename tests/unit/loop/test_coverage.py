"""The books of which tokens the neural draft has seen: proposals over a gap in its KV would be junk."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from outrider_runtime.loop.coverage import NOT_KEPT, BlockIds, DraftCoverage, ScheduledStep

BLOCK = 4


class Blocks:
    """Physical blocks of each request, as the KV cache manager hands them out."""

    def __init__(self, **requests: list[int]) -> None:
        self.requests = requests

    def __call__(self, request: str, first: int, last: int) -> list[int]:
        return self.requests[request][first : last + 1]


class Requests:
    """Requests by name over the columns of `DraftCoverage`: each name has a slot of its own."""

    SLOTS = "abc"

    def __init__(self, blocks: BlockIds) -> None:
        self.books = DraftCoverage(len(self.SLOTS), BLOCK, blocks)

    def seen(self, name: str, start: int) -> int:
        return int(self.books.seen(self._step(name, start, 1))[0])

    def ran(self, name: str, start: int, length: int, *, neural: bool, unsure: int = 0) -> None:
        self.books.ran(self._step(name, start, length, unsure), neural=neural)

    def caught_up(self, name: str, start: int, end: int, context: int) -> None:
        self.books.caught_up(name, self._slot(name), start, end, context)

    def missed(self, name: str, start: int) -> None:
        self.books.missed(name, self._slot(name), start)

    def forget(self, name: str) -> None:
        self.books.forget(self._slot(name))

    def allocated(self, blocks: list[int]) -> None:
        self.books.allocated(blocks)

    def _slot(self, name: str) -> int:
        return self.SLOTS.index(name)

    def _step(self, name: str, start: int, length: int, unsure: int = 0) -> ScheduledStep:
        columns = (self._slot(name), start, start - unsure, 0, length)
        return ScheduledStep([name], *(np.array([value]) for value in columns))


def coverage(**requests: list[int]) -> Requests:
    return Requests(Blocks(**requests))


def is_ready(books: Requests, request: str, start: int) -> bool:
    return books.seen(request, start) == start


def test_a_request_that_the_draft_saw_from_its_start_is_ready() -> None:
    books = coverage(a=[0, 1, 2])
    assert is_ready(books, "a", 0)
    books.ran("a", 0, 6, neural=True)
    assert is_ready(books, "a", 6)
    books.ran("a", 6, 1, neural=True)
    assert is_ready(books, "a", 7)


def test_skipped_step_leaves_a_gap_that_grows() -> None:
    books = coverage(a=[0, 1, 2])
    books.ran("a", 0, 6, neural=True)
    books.ran("a", 6, 1, neural=False)
    books.ran("a", 7, 1, neural=True)
    assert books.seen("a", 8) == 6, "what the draft wrote behind the gap is junk"


def test_gap_filled_in_chunks_makes_the_request_ready() -> None:
    books = coverage(a=[0, 1, 2, 3])
    books.ran("a", 0, 10, neural=False)
    books.caught_up("a", 0, 6, context=10)
    books.ran("a", 10, 1, neural=False)
    assert books.seen("a", 11) == 6
    books.caught_up("a", 6, 11, context=11)
    books.ran("a", 11, 1, neural=True)
    assert is_ready(books, "a", 12)


def test_blocks_closed_by_a_catch_up_serve_later_requests() -> None:
    """The prefix cache hands them on; the block that was only begun when the gap was closed, too."""
    books = coverage(a=[0, 1, 2], b=[0, 1, 2])
    books.ran("a", 0, 10, neural=False)
    books.caught_up("a", 0, 10, context=10)
    books.ran("a", 10, 2, neural=True)
    assert is_ready(books, "b", 12)


def test_a_chunk_that_ends_within_a_block_does_not_make_it_valid() -> None:
    books = coverage(a=[0, 1, 2], b=[0, 1, 2])
    books.ran("a", 0, 12, neural=False)
    books.caught_up("a", 0, 6, context=12)
    assert books.seen("b", 12) == BLOCK


def test_gap_in_shared_blocks_is_filled_once_for_all() -> None:
    """Requests that share a system prompt: what one catches up on, the others need not."""
    books = coverage(a=[0, 1, 2], b=[0, 1, 3])
    books.ran("a", 0, 9, neural=False)
    books.ran("b", 8, 2, neural=False)
    books.caught_up("a", 0, 9, context=9)
    assert books.seen("b", 10) == 8


def test_failed_catch_up_leaves_the_gap() -> None:
    books = coverage(a=[0, 1, 2], b=[0, 1, 2])
    books.ran("a", 0, 6, neural=True)
    books.ran("a", 6, 2, neural=False)
    books.caught_up("a", 6, 8, context=8)
    books.ran("a", 8, 4, neural=True)
    books.missed("a", 6)
    assert books.seen("a", 12) == 6
    assert books.seen("b", 12) == BLOCK
    books.forget("a")
    books.missed("a", 0)  # it was gone when the news came
    assert books.seen("a", 0) == 0


def test_gap_begins_after_the_certain_tokens() -> None:
    """Bug: asynchronous scheduling counts proposals under verification as accepted; the gap would be taken to begin
    after tokens that were then rejected, and a catch-up would leave the first of it open."""
    books = coverage(a=[0, 1, 2, 3])
    books.ran("a", 0, 5, neural=True)
    books.ran("a", 5, 4, neural=True)  # three proposals, none of them accepted as it turns out
    books.ran("a", 9, 1, neural=False, unsure=3)
    assert books.seen("a", 7) == 6


def test_rejected_proposals_leave_no_gap() -> None:
    """The step covered four tokens, two were rejected: the next one starts two earlier and writes them again."""
    books = coverage(a=[0, 1, 2])
    books.ran("a", 0, 4, neural=True)
    books.ran("a", 4, 4, neural=True)
    assert is_ready(books, "a", 6)
    books.ran("a", 6, 1, neural=True)
    assert is_ready(books, "a", 7)


def test_a_prefix_from_the_cache_is_ready_if_the_draft_saw_it() -> None:
    books = coverage(a=[0, 1, 2], b=[0, 1, 5])
    books.ran("a", 0, 9, neural=True)
    books.forget("a")
    assert is_ready(books, "b", 8)


def test_a_prefix_that_was_computed_under_the_gate_is_not_ready() -> None:
    """Bug: the prefix cache hands over the target's KV; the draft's in the same block is another request's."""
    books = coverage(a=[0, 1, 2], b=[0, 1, 5])
    books.ran("a", 0, 9, neural=False)
    books.forget("a")
    assert not is_ready(books, "b", 8)


def test_a_block_that_is_used_again_must_be_drafted_again() -> None:
    books = coverage(a=[0, 1], b=[0, 1], c=[0, 1])
    books.ran("a", 0, 8, neural=True)
    books.forget("a")
    books.ran("b", 0, 8, neural=False)  # block 0 and 1 were freed and given to b
    books.forget("b")
    assert not is_ready(books, "c", 8)


def test_block_begun_in_a_gap_stays_invalid_when_completed() -> None:
    books = coverage(a=[0, 1], b=[0, 1])
    books.ran("a", 0, 2, neural=False)
    books.ran("a", 2, 6, neural=True)
    assert not is_ready(books, "b", 4)


def test_preempted_request_starts_again() -> None:
    books = coverage(a=[0, 1, 2])
    books.ran("a", 0, 5, neural=False)
    books.forget("a")
    books.ran("a", 0, 6, neural=True)
    assert is_ready(books, "a", 6)


def test_blocks_that_cannot_be_known_are_not_trusted() -> None:
    """Models with several kinds of KV cache: nothing is known of a cached prefix."""
    books = Requests(lambda _request, _first, _last: [])
    assert not is_ready(books, "a", 8)
    books.ran("a", 0, 8, neural=True)
    assert is_ready(books, "a", 8)


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.sampled_from([0, 3, 50])), min_size=1, max_size=20)
)
def test_books_agree_with_a_draft_that_writes_token_by_token(steps: list[tuple[int, bool, int]]) -> None:
    """Whatever is skipped and caught up on, in chunks or whole: a token counts as seen only if the draft ran over it
    while all before it were seen; and a block is handed on only if that is so for all of its tokens."""
    total = sum(length for length, _, _ in steps)
    blocks = list(range(total // BLOCK + 1))
    books, written = coverage(a=blocks, b=blocks), 0  # tokens from the start that the draft's KV is right for
    start = 0
    for length, neural, chunk in steps:
        gap = start - books.seen("a", start)
        if chunk and gap:
            end = min(start, written + chunk)
            books.caught_up("a", written, end, context=start)
            written = end
        books.ran("a", start, length, neural=neural)
        if neural and written == start:
            written += length
        start += length
        assert books.seen("a", start) == written
        assert books.seen("b", start // BLOCK * BLOCK) == written // BLOCK * BLOCK


@given(steps=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20))
def test_a_request_is_ready_exactly_when_no_step_was_skipped(steps: list[tuple[int, bool]]) -> None:
    total = sum(length for length, _ in steps)
    books = coverage(a=list(range(total // BLOCK + 1)), b=list(range(total // BLOCK + 1)))
    start = 0
    for length, neural in steps:
        books.ran("a", start, length, neural=neural)
        start += length
    assert is_ready(books, "a", start) == all(neural for _, neural in steps)
    seen = [neural for length, neural in steps for _ in range(length)]
    blocks = start // BLOCK
    assert is_ready(books, "b", blocks * BLOCK) == all(seen[: blocks * BLOCK])


def test_block_filled_by_a_kv_connector_is_not_covered() -> None:
    """Bug: a block stayed valid when it was allocated again. A KV connector fills it without a step, so the draft
    proposed over KV of another request."""
    books = coverage(a=[0, 1], b=[1, 2])
    books.ran("a", 0, 8, neural=True)
    books.allocated([1, 2])
    assert books.seen("b", 8) == 0


def test_prefix_written_in_the_same_step_counts_as_covered() -> None:
    """Bug: vLLM lets a request share blocks that another one fills in this very step; it was taken for unread."""
    books = coverage(a=[0, 1, 2], b=[0, 1, 3])
    columns = (np.array([0, 1]), np.array([0, 8]), np.array([0, 8]), np.array([9, 2]), np.array([9, 2]))
    books.books.ran(ScheduledStep(["a", "b"], *columns), neural=True)
    assert is_ready(books, "b", 10)


class Forgetful(DraftCoverage):
    """Looks at every block of every step again."""

    def _write(self, step: ScheduledStep, *, neural: bool) -> None:
        self._stale[:] = 0
        super()._write(step, neural=neural)


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans(), st.sampled_from([0, 3, 50]), st.booleans()),
        min_size=1, max_size=30,
    )
)  # fmt: skip
def test_blocks_known_to_be_stale_hide_no_later_change(steps: list[tuple[int, int, bool, int, bool]]) -> None:
    """Rejected tokens, catch-ups in chunks, a pass that failed: what a block is worth is as if each were looked at."""
    blocks = list(range(100))
    quick, slow = coverage(a=blocks, b=blocks), coverage(a=blocks, b=blocks)
    slow.books = Forgetful(len(Requests.SLOTS), BLOCK, Blocks(a=blocks, b=blocks))
    start = 0
    for length, rejected, neural, chunk, failed in steps:
        seen = quick.seen("a", start)
        for books in (quick, slow):
            if chunk and seen < start:
                books.caught_up("a", seen, min(start, seen + chunk), context=start)
            books.ran("a", start, length, neural=neural)
            if failed and neural:
                books.missed("a", start)
        start += max(1, length - rejected)
        assert quick.seen("a", start) == slow.seen("a", start)
        assert quick.seen("b", start) == slow.seen("b", start)


class Groups:
    """A draft whose layers lie in two KV groups: each request has blocks in both."""

    def __init__(self, **requests: tuple[list[int], list[int]]) -> None:
        self.requests = requests

    def __call__(self, request: str, first: int, last: int) -> list[int]:
        return [block for group in self.requests[request] for block in group[first : last + 1]]


def test_prefix_hit_with_several_kv_groups_is_covered() -> None:
    """Bug: with several KV groups every prefix hit was a gap, which a block drafter never closes."""
    books = Requests(Groups(a=([0, 1], [10, 11]), b=([0, 1, 2], [10, 11, 12])))
    books.ran("a", 0, 8, neural=True)
    books.forget("a")
    assert is_ready(books, "b", 8)


def test_prefix_hit_needs_the_blocks_of_every_kv_group() -> None:
    """A hit may bring the blocks of each group from another request."""
    books = Requests(Groups(a=([0, 1], [10, 11]), b=([2, 3], [12, 13]), c=([0, 3], [10, 11])))
    books.ran("a", 0, 8, neural=True)
    books.ran("b", 0, 8, neural=False)
    assert books.seen("c", 8) == BLOCK


def test_blocks_behind_a_window_need_no_coverage() -> None:
    books = coverage(a=[0, 1, 2], b=[NOT_KEPT, 1, 2])
    books.ran("a", 0, 12, neural=True)
    books.allocated([0])
    assert is_ready(books, "b", 12)
