"""Restart background tasks that fail, with back-off: a defect in one task does not stop the others."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from outrider_operator.operator_metrics import telemetry

logger = logging.getLogger(__name__)
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
RUNNING = "running"


class Backoff:
    """Pauses that double from `first_s` to `longest_s` until a success resets them.

    Each pause is shortened by up to a half at random, so that attempts that failed together do not retry together.
    """

    def __init__(self, first_s: float, longest_s: float, chance: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._chance = chance
        self._next_s = first_s

    def next_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(self._longest_s, 2 * pause_s)
        return pause_s * (1 - self._chance() / 2)

    def reset(self) -> None:
        self._next_s = self._first_s


class Supervisor:
    """Runs tasks that should never end by themselves, and reports their health."""

    def __init__(self) -> None:
        self._tasks: dict[str, str] = {}

    async def supervise(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Run `task` until cancelled. If it ends, restart it after a pause that grows with each failure in a row."""
        clock, backoff = asyncio.get_running_loop().time, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while True:
                began, self._tasks[name] = clock(), RUNNING
                why = await _end_of(name, task)
                if clock() - began > LONGEST_PAUSE_S:
                    backoff.reset()
                pause_s = backoff.next_s()
                telemetry.TASK_RESTARTS.labels(task=name).inc()
                self._tasks[name] = f"started again in {pause_s:.1f} s: {why}"
                logger.error("The task %s is %s", name, self._tasks[name])
                await asyncio.sleep(pause_s)
        finally:
            del self._tasks[name]

    def health(self) -> dict[str, str]:
        """Task name -> "running", or the reason why it ended."""
        return dict(self._tasks)


async def _end_of(name: str, task: Callable[[], Awaitable[None]]) -> str:
    """Run `task` and return the reason why it ended."""
    try:
        await task()
    except asyncio.CancelledError:
        if (current := asyncio.current_task()) is None or current.cancelling():
            raise
        return "something that it waited for was cancelled"
    except Exception as error:
        logger.exception("The task %s failed", name)
        return f"{type(error).__name__}: {error}"[:200]
    return "it ended by itself"
