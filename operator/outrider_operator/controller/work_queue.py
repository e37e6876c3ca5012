"""The work queue: one reconcile of a key at a time, wake-ups coalesced, failures retried with back-off."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

from outrider_operator.cluster.cache import Key
from outrider_operator.controller.supervision import Backoff
from outrider_operator.operator_metrics import telemetry

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 60.0

OWN_CHANGE_S = 0.0
"""Patience in seconds after a change of the service itself, for which a user waits."""
CHILD_CHANGE_S = 2.0
"""Patience in seconds after a change of an object that belongs to the service."""
SHARED_CHANGE_S = 60.0
"""Patience in seconds after a change that concerns many services, and for the regular resync."""


@dataclass(order=True)
class _Wait:
    due: float
    """Time of the event loop by which the key should run. Keys run in this order, so that none waits for ever."""
    number: int
    added: float
    patience_s: float
    key: Key


@dataclass(frozen=True)
class _Run:
    patience_s: float
    """Patience of the wake-up."""
    since: float
    """Time of the event loop."""


class WorkQueue:
    """Keys that wait for a reconcile. The key whose patience ends first runs first.

    A key that is added while it runs is run once more: the worker may have read the state before the change. At most
    `most_at_once` keys of a namespace run at once, so that a namespace whose webhook does not answer delays no other.
    """

    def __init__(self, most_at_once: int) -> None:
        self._most_at_once = most_at_once
        self._heap: list[_Wait] = []
        self._parked: defaultdict[str, list[_Wait]] = defaultdict(list)
        """Namespace -> heap of keys whose turn came while the namespace had enough running keys."""
        self._at_work: Counter[str] = Counter()
        """Namespace -> number of running keys."""
        self._waits: dict[Key, _Wait] = {}
        """Key -> its valid entry. Other entries of the key in the heaps are outdated."""
        self._running: dict[Key, _Run] = {}
        self._number = 0
        self._backoffs: dict[Key, Backoff] = {}
        """Key that failed at its last run -> its back-off."""
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._added = asyncio.Event()

    def add(self, key: Key, patience_s: float = SHARED_CHANGE_S) -> None:
        """Wake the key now. If it is added several times before it runs, the lowest patience counts."""
        at = asyncio.get_running_loop().time()
        waits = self._waits.get(key)
        if waits is not None and waits.due <= at + patience_s:
            return
        self._number += 1
        added = waits.added if waits is not None else at
        self._waits[key] = _Wait(at + patience_s, self._number, added, patience_s, key)
        if key not in self._running:
            self._put(key)

    def add_after(self, key: Key, delay_s: float, patience_s: float = SHARED_CHANGE_S) -> None:
        """Wake the key after `delay_s`, unless an earlier wake-up is set already."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + delay_s:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self._fire, key, patience_s)

    async def get(self) -> Key:
        """The next key, which runs until the caller releases it."""
        while (waits := self._pop()) is None:
            self._added.clear()
            await self._added.wait()
        at = asyncio.get_running_loop().time()
        self._running[waits.key] = _Run(waits.patience_s, at)
        self._at_work[waits.key.namespace] += 1
        telemetry.WAIT_SECONDS.observe(at - waits.added)
        return waits.key

    def release(self, key: Key) -> None:
        """Let the key run again."""
        del self._running[key]
        self._at_work[key.namespace] -= 1
        if key in self._waits:
            self._put(key)
        self._unpark(key.namespace)

    def retry(self, key: Key) -> float:
        """Wake the running key after a pause that grows with each failure in a row. Returns the pause in seconds.

        The patience stays the same: a user may still be waiting for the result.
        """
        delay_s = self._backoffs.setdefault(key, Backoff(FIRST_RETRY_S, LONGEST_RETRY_S)).next_s()
        self.add_after(key, delay_s, self._running[key].patience_s)
        return delay_s

    def reset(self, key: Key) -> None:
        """Note a success: the next pause is short again."""
        self._backoffs.pop(key, None)

    def oldest_s(self) -> float:
        """Seconds for which the oldest running key runs; 0 without one."""
        began = [run.since for run in list(self._running.values())]
        return time.monotonic() - min(began) if began else 0.0

    def __len__(self) -> int:
        """Number of keys that wait."""
        return len(self._waits)

    def _fire(self, key: Key, patience_s: float) -> None:
        self._timers.pop(key, None)
        self.add(key, patience_s)

    def _put(self, key: Key) -> None:
        heapq.heappush(self._heap, self._waits[key])
        self._added.set()

    def _unpark(self, namespace: str) -> None:
        """Return the next parked key of a namespace to the heap, since one of its keys is done."""
        parked = self._parked[namespace]
        while parked:
            waits = heapq.heappop(parked)
            if self._is_valid(waits):
                self._put(waits.key)
                break
        if not parked:
            del self._parked[namespace]

    def _pop(self) -> _Wait | None:
        while self._heap:
            waits = heapq.heappop(self._heap)
            if not self._is_valid(waits):
                continue
            if self._at_work[waits.key.namespace] < self._most_at_once:
                return self._waits.pop(waits.key)
            heapq.heappush(self._parked[waits.key.namespace], waits)
        return None

    def _is_valid(self, waits: _Wait) -> bool:
        """False for an entry that a newer entry of its key replaced."""
        return self._waits.get(waits.key) is waits
