"""Keeps background tasks alive: a defect in one stops neither it for long nor the others at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from outrider_operator import telemetry
from outrider_operator.backoff import Backoff

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
RUNNING = "running"


class Supervisor:
    """Runs tasks that never end by themselves, and knows how each is."""

    def __init__(self) -> None:
        self._tasks: dict[str, str] = {}

    async def keep(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Run `task` until cancelled; where it ends, start it again after a pause that grows while it keeps failing."""
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
        """Task -> "running", or what ended it."""
        return dict(self._tasks)


async def _end_of(name: str, task: Callable[[], Awaitable[None]]) -> str:
    """Why `task` ended."""
    try:
        await task()
    except Exception as error:
        logger.exception("The task %s failed", name)
        return f"{type(error).__name__}: {error}"[:200]
    return "it ended by itself"
