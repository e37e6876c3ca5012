"""The work queue: what a service can rely on, however events come."""

from __future__ import annotations

import asyncio

from outrider_operator.cluster.cache import Key
from outrider_operator.controller import work_queue

A, B = Key("ns", "a"), Key("ns", "b")


async def test_many_wake_ups_are_one_reconcile() -> None:
    """Coalesced: a storm of events costs one look."""
    queue = work_queue.WorkQueue(most_at_once=2)
    for _ in range(100):
        queue.add(A)
    assert await queue.get() == A
    assert not await _has_next(queue)


async def test_a_change_while_at_work_is_looked_at_afterwards() -> None:
    """The worker may have read the state before the change; and no second worker takes the key meanwhile."""
    queue = work_queue.WorkQueue(most_at_once=2)
    queue.add(A)
    assert await queue.get() == A
    queue.add(A)
    assert not await _has_next(queue)
    queue.release(A)
    assert await queue.get() == A


async def test_pauses_grow_up_to_a_limit_and_end_with_success() -> None:
    """A failing service neither spins nor is given up, and has pauses of its own."""
    queue = work_queue.WorkQueue(most_at_once=2)
    pauses_s = [await _retried(queue, A) for _ in range(12)]
    assert pauses_s[0] <= work_queue.FIRST_RETRY_S <= pauses_s[2]
    assert work_queue.LONGEST_RETRY_S / 2 <= pauses_s[-1] <= work_queue.LONGEST_RETRY_S
    assert await _retried(queue, B) <= work_queue.FIRST_RETRY_S
    queue.add(A)
    queue.reset(await queue.get())
    queue.release(A)
    assert await _retried(queue, A) <= work_queue.FIRST_RETRY_S


async def test_a_retried_key_comes_before_patient_keys() -> None:
    """A change whose object had moved on was put behind a thousand regular looks: p99 8 s."""
    queue = work_queue.WorkQueue(most_at_once=2)
    queue.add(A, work_queue.OWN_CHANGE_S)
    assert await queue.get() == A
    queue.add(B, work_queue.SHARED_CHANGE_S)
    queue.retry(A)
    queue.release(A)
    await asyncio.sleep(2 * work_queue.FIRST_RETRY_S)
    assert await queue.get() == A


async def test_the_earlier_of_two_later_looks_counts() -> None:
    """Requeue-after never postpones a look that was due sooner."""
    queue = work_queue.WorkQueue(most_at_once=2)
    queue.add_after(A, 0.02)
    queue.add_after(A, 60.0)
    queue.add_after(B, 60.0)
    queue.add_after(B, 0.01)
    assert await asyncio.wait_for(queue.get(), 60) == B
    assert await asyncio.wait_for(queue.get(), 60) == A


async def test_a_key_that_waits_already_can_get_urgent() -> None:
    """And runs once all the same."""
    queue = work_queue.WorkQueue(most_at_once=2)
    queue.add(A, work_queue.SHARED_CHANGE_S)
    queue.add(B, work_queue.SHARED_CHANGE_S)
    queue.add(B, work_queue.OWN_CHANGE_S)
    assert [await queue.get(), await queue.get()] == [B, A]
    queue.release(A)
    queue.release(B)
    assert not await _has_next(queue)


async def test_a_namespace_whose_writes_take_long_holds_up_no_other() -> None:
    """Twenty services behind a webhook that did not answer had every worker, and a neighbour waited for a minute."""
    queue = work_queue.WorkQueue(most_at_once=2)
    slow = [Key("slow", str(number)) for number in range(5)]
    for key in slow:
        queue.add(key, work_queue.OWN_CHANGE_S)
    queue.add(A, work_queue.SHARED_CHANGE_S)
    assert [await queue.get() for _ in range(3)] == [*slow[:2], A]
    queue.add(slow[4], work_queue.OWN_CHANGE_S)
    assert not await _has_next(queue)
    queue.release(slow[0])
    assert await queue.get() == slow[2]
    assert not await _has_next(queue)
    queue.release(slow[1])
    queue.release(slow[2])
    assert [await queue.get(), await queue.get()] == slow[3:]


async def test_key_that_becomes_urgent_during_work_runs_once() -> None:
    """The entry that it replaced blocks no other key."""
    queue = work_queue.WorkQueue(most_at_once=1)
    busy, first, second = (Key("slow", name) for name in ("busy", "first", "second"))
    queue.add(busy, work_queue.OWN_CHANGE_S)
    queue.add(first, work_queue.SHARED_CHANGE_S)
    queue.add(second, work_queue.SHARED_CHANGE_S)
    assert await queue.get() == busy
    assert not await _has_next(queue)
    queue.add(second, work_queue.OWN_CHANGE_S)
    for expected in (second, first):
        queue.release(busy)
        busy = await queue.get()
        assert busy == expected
    queue.release(busy)
    assert not await _has_next(queue)


async def _retried(queue: work_queue.WorkQueue, key: Key) -> float:
    queue.add(key)
    assert await queue.get() == key
    pause_s = queue.retry(key)
    queue.release(key)
    return pause_s


async def _has_next(queue: work_queue.WorkQueue) -> bool:
    try:
        await asyncio.wait_for(queue.get(), 0.05)
    except TimeoutError:
        return False
    return True
