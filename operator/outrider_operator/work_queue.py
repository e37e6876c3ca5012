"""The work queue: one reconcile of a key at a time, wake-ups coalesced, failures retried with back-off."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass

from outrider_operator import telemetry
from outrider_operator.backoff import Backoff

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 60.0

OWN_CHANGE_S = 0.0
"""The service itself changed: a user waits for it."""
CHILD_CHANGE_S = 2.0
"""Something that belongs to it changed."""
SHARED_CHANGE_S = 60.0
"""Something changed that may matter to many, or it is time to look again: behind every change that a user waits for."""


@dataclass(frozen=True, order=True)
class Key:
    """A SpeculativeService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(order=True)
class _Wait:
    due: float
    """In the loop's time: keys run in this order, so that no wake-up waits for ever."""
    number: int
    added: float
    patience_s: float
    key: Key


class WorkQueue:
    """Keys that wait for a reconcile, those first whose patience ends first.

    A key that is added while it is being worked on runs once more afterwards: the worker may have read the
    state before that change. Of one namespace no more than `most_at_once` are worked on: where each write takes long (a
    webhook of that namespace that does not answer), the others' turn comes all the same.
    """

    def __init__(self, most_at_once: int) -> None:
        self._most_at_once = most_at_once
        self._heap: list[_Wait] = []
        self._parked: defaultdict[str, list[_Wait]] = defaultdict(list)
        """Heaps of those whose turn came while their namespace had enough at work."""
        self._at_work: Counter[str] = Counter()
        """By namespace."""
        self._waits: dict[Key, _Wait] = {}
        """The one that counts for each key; others in the heap were overtaken."""
        self._running: dict[Key, float] = {}
        """Those that are worked on, and how patient their wake-up was."""
        self._number = 0
        self._backoffs: dict[Key, Backoff] = {}
        """Of those that failed when they ran last."""
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._added = asyncio.Event()

    def add(self, key: Key, patience_s: float = SHARED_CHANGE_S) -> None:
        """Wake the key now; of several calls before it runs, the least patient counts."""
        now = asyncio.get_running_loop().time()
        waits = self._waits.get(key)
        if waits is not None and waits.due <= now + patience_s:
            return
        self._number += 1
        added = waits.added if waits is not None else now
        self._waits[key] = _Wait(now + patience_s, self._number, added, patience_s, key)
        if key not in self._running:
            self._put(key)

    def add_after(self, key: Key, delay_s: float, patience_s: float = SHARED_CHANGE_S) -> None:
        """Wake the key after `delay_s`, or earlier where an earlier wake-up is already set."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + delay_s:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self._fire, key, patience_s)

    async def get(self) -> Key:
        """The next key; the caller must call `done` or `retry` with it."""
        while (waits := self._pop()) is None:
            self._added.clear()
            await self._added.wait()
        self._running[waits.key] = waits.patience_s
        self._at_work[waits.key.namespace] += 1
        telemetry.QUEUE_LENGTH.set(len(self._waits))
        telemetry.WAIT_SECONDS.observe(asyncio.get_running_loop().time() - waits.added)
        return waits.key

    def done(self, key: Key) -> None:
        self._backoffs.pop(key, None)
        self._release(key)

    def retry(self, key: Key) -> float:
        """Try again after a pause that grows with each failure in a row; returns it in seconds.

        As patiently as before: who waited for this look still does.
        """
        delay_s = self._backoffs.setdefault(key, Backoff(FIRST_RETRY_S, LONGEST_RETRY_S)).next_s()
        patience_s = self._running[key]
        self._release(key)
        self.add_after(key, delay_s, patience_s)
        return delay_s

    def _fire(self, key: Key, patience_s: float) -> None:
        self._timers.pop(key, None)
        self.add(key, patience_s)

    def _release(self, key: Key) -> None:
        del self._running[key]
        self._at_work[key.namespace] -= 1
        if key in self._waits:
            self._put(key)
        self._unpark(key.namespace)

    def _put(self, key: Key) -> None:
        heapq.heappush(self._heap, self._waits[key])
        telemetry.QUEUE_LENGTH.set(len(self._waits))
        self._added.set()

    def _unpark(self, namespace: str) -> None:
        """The next of those that waited for one of their namespace to be done."""
        parked = self._parked[namespace]
        while parked:
            waits = heapq.heappop(parked)
            if self._counts(waits):
                self._put(waits.key)
                break
        if not parked:
            del self._parked[namespace]

    def _pop(self) -> _Wait | None:
        while self._heap:
            waits = heapq.heappop(self._heap)
            if not self._counts(waits):
                continue
            if self._at_work[waits.key.namespace] < self._most_at_once:
                return self._waits.pop(waits.key)
            heapq.heappush(self._parked[waits.key.namespace], waits)
        return None

    def _counts(self, waits: _Wait) -> bool:
        """False of one that was overtaken by another of its key."""
        return self._waits.get(waits.key) is waits
