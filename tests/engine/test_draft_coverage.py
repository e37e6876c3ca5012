"""The books of which tokens the neural draft has seen: proposals over a hole in its KV would be junk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_runtime.vllm_plugin.coverage import DraftCoverage, ScheduledTokens

BLOCK = 4


class Blocks:
    """Physical blocks of each request, as the KV cache manager hands them out."""

    def __init__(self, **requests: list[int]) -> None:
        self.requests = requests

    def __call__(self, request: str, first: int, last: int) -> list[int]:
        return self.requests[request][first : last + 1]


def coverage(**requests: list[int]) -> DraftCoverage:
    return DraftCoverage(BLOCK, Blocks(**requests))


def test_a_request_that_the_draft_saw_from_its_start_is_ready() -> None:
    books = coverage(a=[0, 1, 2])
    assert books.ready("a", 0)
    books.ran([ScheduledTokens("a", 0, 6)], neural=True)
    assert books.ready("a", 6)
    books.ran([ScheduledTokens("a", 6, 1)], neural=True)
    assert books.ready("a", 7)


def test_a_skipped_step_leaves_a_hole_for_good() -> None:
    books = coverage(a=[0, 1, 2])
    books.ran([ScheduledTokens("a", 0, 6)], neural=True)
    books.ran([ScheduledTokens("a", 6, 1)], neural=False)
    books.ran([ScheduledTokens("a", 7, 1)], neural=True)
    assert not books.ready("a", 8)


def test_rejected_proposals_are_no_hole() -> None:
    """The step covered four tokens, two were rejected: the next one starts two earlier and writes them again."""
    books = coverage(a=[0, 1, 2])
    books.ran([ScheduledTokens("a", 0, 4)], neural=True)
    books.ran([ScheduledTokens("a", 4, 4)], neural=True)
    assert books.ready("a", 6)
    books.ran([ScheduledTokens("a", 6, 1)], neural=True)
    assert books.ready("a", 7)


def test_a_prefix_from_the_cache_is_ready_if_the_draft_saw_it() -> None:
    books = coverage(a=[0, 1, 2], b=[0, 1, 5])
    books.ran([ScheduledTokens("a", 0, 9)], neural=True)
    books.forget("a")
    assert books.ready("b", 8)


def test_a_prefix_that_was_computed_under_the_gate_is_not_ready() -> None:
    """Bug: the prefix cache hands over the target's KV; the draft's in the same block is another request's."""
    books = coverage(a=[0, 1, 2], b=[0, 1, 5])
    books.ran([ScheduledTokens("a", 0, 9)], neural=False)
    books.forget("a")
    assert not books.ready("b", 8)


def test_a_block_that_is_used_again_must_be_drafted_again() -> None:
    books = coverage(a=[0, 1], b=[0, 1], c=[0, 1])
    books.ran([ScheduledTokens("a", 0, 8)], neural=True)
    books.forget("a")
    books.ran([ScheduledTokens("b", 0, 8)], neural=False)  # block 0 and 1 were freed and given to b
    books.forget("b")
    assert not books.ready("c", 8)


def test_a_block_that_was_begun_in_a_hole_stays_invalid_when_its_rest_is_drafted() -> None:
    books = coverage(a=[0, 1], b=[0, 1])
    books.ran([ScheduledTokens("a", 0, 2)], neural=False)
    books.ran([ScheduledTokens("a", 2, 6)], neural=True)
    assert not books.ready("b", 4)


def test_a_preempted_request_starts_anew() -> None:
    books = coverage(a=[0, 1, 2])
    books.ran([ScheduledTokens("a", 0, 5)], neural=False)
    books.forget("a")
    books.ran([ScheduledTokens("a", 0, 6)], neural=True)
    assert books.ready("a", 6)


def test_blocks_that_cannot_be_known_are_not_trusted() -> None:
    """Models with several kinds of KV cache: nothing is known of a cached prefix."""
    books = DraftCoverage(BLOCK, lambda _request, _first, _last: [])
    assert not books.ready("a", 8)
    books.ran([ScheduledTokens("a", 0, 8)], neural=True)
    assert books.ready("a", 8)


@given(steps=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20))
def test_a_request_is_ready_exactly_when_no_step_was_skipped(steps: list[tuple[int, bool]]) -> None:
    total = sum(length for length, _ in steps)
    books = coverage(a=list(range(total // BLOCK + 1)), b=list(range(total // BLOCK + 1)))
    start = 0
    for length, neural in steps:
        books.ran([ScheduledTokens("a", start, length)], neural=neural)
        start += length
    assert books.ready("a", start) == all(neural for _, neural in steps)
    seen = [neural for length, neural in steps for _ in range(length)]
    blocks = start // BLOCK
    assert books.ready("b", blocks * BLOCK) == all(seen[: blocks * BLOCK])
