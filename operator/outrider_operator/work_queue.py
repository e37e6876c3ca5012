"""The work queue: one reconcile of a key at a time, wake-ups coalesced, failures retried with back-off."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from outrider_operator import telemetry

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, order=True)
class Key:
    """A SpeculativeService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class WorkQueue:
    """Keys that wait for a reconcile.

    A key that is added while it is being worked on runs once more afterwards: the worker may have read the
    state before that change.
    """

    def __init__(self) -> None:
        self._waiting: deque[Key] = deque()
        self._dirty: dict[Key, float] = {}  # key -> when it was first added, in the loop's time
        self._running: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._added = asyncio.Event()

    def add(self, key: Key) -> None:
        """Wake the key now; further calls before it runs add nothing."""
        if key in self._dirty:
            return
        self._dirty[key] = asyncio.get_running_loop().time()
        if key not in self._running:
            self._put(key)

    def add_after(self, key: Key, delay_s: float) -> None:
        """Wake the key after `delay_s`, or earlier where an earlier wake-up is already set."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + delay_s:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self._fire, key)

    async def get(self) -> Key:
        """The next key; the caller must call `done` or `retry` with it."""
        while not self._waiting:
            self._added.clear()
            await self._added.wait()
        key = self._waiting.popleft()
        telemetry.QUEUE_LENGTH.set(len(self._waiting))
        telemetry.WAIT_SECONDS.observe(asyncio.get_running_loop().time() - self._dirty.pop(key))
        self._running.add(key)
        return key

    def done(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._release(key)

    def retry(self, key: Key) -> float:
        """Try again after a back-off that doubles with each failure in a row; returns it in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures, 30))
        self._release(key)
        self.add_after(key, delay_s)
        return delay_s

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a deleted service's key."""
        self._failures.pop(key, None)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _release(self, key: Key) -> None:
        self._running.discard(key)
        if key in self._dirty:
            self._put(key)

    def _put(self, key: Key) -> None:
        self._waiting.append(key)
        telemetry.QUEUE_LENGTH.set(len(self._waiting))
        self._added.set()
