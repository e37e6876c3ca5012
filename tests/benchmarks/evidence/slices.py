"""Systems that are measured at the same time: each has the machine for a slice at a time, and its clock goes then only.

How fast a rented machine is changes by a tenth from one second to the next. Systems that are measured one after the
other are compared under conditions that differ by that much; in slices of a second they share the good ones and the
bad. A system that does not have its slice is stopped, in the midst of a step, and knows nothing of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

SLICE_S = 1.0
Result = TypeVar("Result")


class Stopwatch:
    """Wall seconds in which it was running."""

    def __init__(self, wall: Callable[[], float] = time.perf_counter) -> None:
        self._wall = wall
        self._seconds = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._seconds + (0.0 if self._since is None else self._wall() - self._since)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Stopped again afterwards."""
        self._since = self._wall()
        try:
            yield
        finally:
            self._seconds, self._since = self(), None


@dataclass(frozen=True)
class Job(Generic[Result]):
    """What is done with one system."""

    awake: Callable[[], AbstractContextManager[None]]
    """The system has the machine inside. Raises RuntimeError when it has ended."""
    work: Callable[[Stopwatch], Coroutine[Any, Any, Result]]
    """Begins in the system's first slice. The stopwatch runs in its slices only."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)


async def in_slices(jobs: Mapping[str, Job[Result]], slice_s: float = SLICE_S) -> dict[str, Result | BaseException]:
    """What each job came to, or what it raised. One that is done leaves its slices to the others."""
    tasks: dict[str, asyncio.Task[Result]] = {}
    ended: dict[str, BaseException] = {}
    left = list(jobs)
    while left:
        for name in left:
            try:
                await _slice(jobs[name], name, tasks, slice_s if len(left) > 1 else None)
            except RuntimeError as error:
                ended[name] = error
        left = [name for name in left if name not in ended and not tasks[name].done()]
    for name in ended.keys() & tasks.keys():
        tasks[name].cancel()
    found = await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {**dict(zip(tasks, found, strict=True)), **ended}


async def _slice(job: Job[Result], name: str, tasks: dict[str, asyncio.Task[Result]], slice_s: float | None) -> None:
    with job.awake(), job.stopwatch.running():
        if name not in tasks:
            tasks[name] = asyncio.create_task(job.work(job.stopwatch))
        await asyncio.wait([tasks[name]], timeout=slice_s)
