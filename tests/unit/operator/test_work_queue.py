"""The work queue: what a service can rely on, however events come."""

from __future__ import annotations

import asyncio

from outrider_operator.work_queue import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    OWN_CHANGE_S,
    SHARED_CHANGE_S,
    Key,
    WorkQueue,
)

A, B = Key("ns", "a"), Key("ns", "b")


async def test_many_wake_ups_are_one_reconcile() -> None:
    """Coalesced: a storm of events costs one look."""
    queue = WorkQueue()
    for _ in range(100):
        queue.add(A)
    assert await queue.get() == A
    assert not await _has_next(queue)


async def test_a_change_while_at_work_is_looked_at_afterwards() -> None:
    """The worker may have read the state before the change; and no second worker takes the key meanwhile."""
    queue = WorkQueue()
    queue.add(A)
    assert await queue.get() == A
    queue.add(A)
    assert not await _has_next(queue)
    queue.done(A)
    assert await queue.get() == A


async def test_one_key_does_not_hold_up_another() -> None:
    queue = WorkQueue()
    queue.add(A)
    queue.add(B)
    assert [await queue.get(), await queue.get()] == [A, B]


async def test_pauses_grow_up_to_a_limit_and_end_with_success() -> None:
    """A failing service neither spins nor is given up, and has pauses of its own."""
    queue = WorkQueue()
    pauses_s = [queue.retry(A) for _ in range(12)]
    assert pauses_s[0] <= FIRST_RETRY_S <= pauses_s[2]
    assert LONGEST_RETRY_S / 2 <= pauses_s[-1] <= LONGEST_RETRY_S
    assert queue.retry(B) <= FIRST_RETRY_S
    queue.done(A)
    assert queue.retry(A) <= FIRST_RETRY_S


async def test_who_is_tried_again_comes_before_those_who_can_wait() -> None:
    """A change whose object had moved on was put behind a thousand regular looks: p99 8 s."""
    queue = WorkQueue()
    queue.add(A, OWN_CHANGE_S)
    assert await queue.get() == A
    queue.add(B, SHARED_CHANGE_S)
    queue.retry(A)
    await asyncio.sleep(2 * FIRST_RETRY_S)
    assert await queue.get() == A


async def test_the_earlier_of_two_later_looks_counts() -> None:
    """Requeue-after never postpones a look that was due sooner."""
    queue = WorkQueue()
    queue.add_after(A, 0.02)
    queue.add_after(A, 60.0)
    queue.add_after(B, 60.0)
    queue.add_after(B, 0.01)
    assert await asyncio.wait_for(queue.get(), 60) == B
    assert await asyncio.wait_for(queue.get(), 60) == A


async def test_what_a_user_waits_for_goes_first() -> None:
    """A change of one service does not stand behind the regular look at a thousand others."""
    queue = WorkQueue()
    queue.add(A, SHARED_CHANGE_S)
    queue.add(B, OWN_CHANGE_S)
    assert [await queue.get(), await queue.get()] == [B, A]


async def test_a_key_that_waits_already_can_get_urgent() -> None:
    """And runs once all the same."""
    queue = WorkQueue()
    queue.add(A, SHARED_CHANGE_S)
    queue.add(B, SHARED_CHANGE_S)
    queue.add(B, OWN_CHANGE_S)
    assert [await queue.get(), await queue.get()] == [B, A]
    queue.done(A)
    queue.done(B)
    assert not await _has_next(queue)


async def _has_next(queue: WorkQueue) -> bool:
    try:
        await asyncio.wait_for(queue.get(), 0.05)
    except TimeoutError:
        return False
    return True
