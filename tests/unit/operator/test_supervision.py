"""A defect in one background task is neither the end of it nor of anything else."""

from __future__ import annotations

import asyncio

import pytest
from outrider_operator.controller import supervision
from outrider_operator.controller.supervision import RUNNING, Backoff, Supervisor
from outrider_operator.operator_metrics import telemetry


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)


async def test_a_task_that_fails_is_started_again_counted_and_named() -> None:
    """It ended the operator for every service."""
    attempts: list[int] = []
    again = asyncio.Event()

    async def task() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise KeyError("outrider.dev/service")
        again.set()
        await asyncio.Event().wait()

    supervisor = Supervisor()
    before = _restarts("polls")
    kept = asyncio.create_task(supervisor.supervise("polls", task))
    await asyncio.wait_for(again.wait(), 60)
    assert _restarts("polls") == before + 1
    assert supervisor.health() == {"polls": RUNNING}
    kept.cancel()


async def test_what_ended_a_task_stands_in_its_health() -> None:
    async def task() -> None:
        raise ValueError("no such thing")

    supervisor = Supervisor()
    kept = asyncio.create_task(supervisor.supervise("polls", task))
    async with asyncio.timeout(60):
        while "ValueError: no such thing" not in supervisor.health().get("polls", ""):
            await asyncio.sleep(0)
    kept.cancel()


async def test_a_task_that_a_cancelled_future_ended_is_restarted() -> None:
    """A TaskGroup takes a cancelled task for one that was stopped: a worker less, without a word."""

    async def task() -> None:
        raise asyncio.CancelledError

    supervisor = Supervisor()
    kept = asyncio.create_task(supervisor.supervise("polls", task))
    async with asyncio.timeout(60):
        while "cancelled" not in supervisor.health().get("polls", ""):
            await asyncio.sleep(0)
    kept.cancel()


async def test_the_end_of_the_operator_ends_its_tasks() -> None:
    supervisor = Supervisor()
    kept = asyncio.create_task(supervisor.supervise("polls", asyncio.Event().wait))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    kept.cancel()
    with pytest.raises(asyncio.CancelledError):
        await kept
    assert supervisor.health() == {}


def test_pauses_double_up_to_a_limit_and_differ() -> None:
    """What failed together does not come back together; success ends it."""
    shares = iter([0.0, 1.0, 0.0, 0.5, 0.0, 0.0])
    backoff = Backoff(1.0, 8.0, lambda: next(shares))
    assert [backoff.next_s() for _ in range(5)] == [1.0, 1.0, 4.0, 6.0, 8.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def _restarts(task: str) -> float:
    return float(telemetry.TASK_RESTARTS.labels(task=task)._value.get())
