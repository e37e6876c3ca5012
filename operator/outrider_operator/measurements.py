"""What is known of a service's behaviour, whichever source its spec names for the figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from outrider_crds.spec import MetricsSource
from outrider_crds.state import RuntimeState

from outrider_operator.cache import Cache
from outrider_operator.decide.conditions.status import FIGURES_EVERY_S
from outrider_operator.decide.figures.windows import History, forget, record, windows
from outrider_operator.metrics.pods import PodStates
from outrider_operator.metrics.prometheus import PrometheusFigures
from outrider_operator.model import FigureWindows, Object
from outrider_operator.work_queue import Key

LOOKS_A_WINDOW = 12
"""Busy pods are asked, and what they say is recorded, so often in a window: every 5 s of a minute."""


@dataclass
class _Followed:
    """A service's history, and when its figures last moved and were last looked at."""

    history: History = field(default_factory=History)
    moved_at: float = 0.0
    woken_at: float = 0.0


class Measurements:
    """States always come from the pods (only they know what configuration is in force), figures from either."""

    def __init__(
        self, cache: Cache, changed: Callable[[Key], None], prometheus: PrometheusFigures | None, window_s: float
    ) -> None:
        self._pods = PodStates(cache, changed, window_s / LOOKS_A_WINDOW)
        self._changed = changed
        self._prometheus = prometheus
        self._window_s = window_s
        self._histories: dict[Key, _Followed] = {}
        self._ready: Mapping[Key, set[str]] = {}

    async def run(self) -> None:
        """Keep the measurements fresh until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pods.run(), name="polls of the pods")
            group.create_task(self._record(), name="histories")
            if self._prometheus is not None:
                group.create_task(self._prometheus.run(), name="queries to Prometheus")

    async def first_round(self) -> None:
        """Return once every pod that is ready now was asked, so that no pod is taken for a silent one."""
        await self._pods.ask_all()

    def states(self, key: Key) -> Mapping[str, RuntimeState]:
        return self._pods.states(key)

    def expect_news(self, key: Key, expected: bool) -> None:
        """Ask the service's pods more often, or no longer."""
        self._pods.set_urgent(key, expected)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a service that is gone."""
        self._pods.set_urgent(key, False)
        self._histories.pop(key, None)

    def figures(self, key: Key, service: Object) -> FigureWindows:
        source = ((service.get("spec") or {}).get("metrics") or {}).get("source")
        if source == MetricsSource.PROMETHEUS:
            return self._from_prometheus(key)
        ready, answered = self._ready.get(key, set()), self._pods.states(key)
        error = f"none of the {len(ready)} ready pods answers on its state endpoint" if ready and not answered else ""
        followed = self._histories.get(key, _Followed())
        return windows(followed.history, time.time(), self._window_s, error)

    def _from_prometheus(self, key: Key) -> FigureWindows:
        if self._prometheus is None:
            return FigureWindows(error="the chart names no Prometheus (prometheus.url)")
        found = self._prometheus.figures(key)
        current = found.current and replace(found.current, pods_ready=len(self._ready.get(key, set())))
        return replace(found, current=current)

    async def _record(self) -> None:
        while True:
            self._ready, existing, now = self._pods.ready(), self._pods.existing(), time.time()
            for key in self._histories.keys() - existing.keys():
                del self._histories[key]
            for key, pods in existing.items():
                followed = self._histories.setdefault(key, _Followed(moved_at=now))
                self._look(key, followed, pods, now)
                self._wake(key, followed, now)
            await asyncio.sleep(self._window_s / LOOKS_A_WINDOW)

    def _look(self, key: Key, followed: _Followed, pods: set[str], now: float) -> None:
        ready = len(self._ready.get(key, set()))
        history = record(followed.history, self._pods.states(key), ready, now, self._window_s)
        if followed.history.looks and history.looks[-1].totals != followed.history.looks[-1].totals:
            followed.moved_at = now
        followed.history = forget(history, pods)

    def _wake(self, key: Key, followed: _Followed, now: float) -> None:
        """Have the figures judged while they can change: until two windows hold no traffic any more."""
        every_s = min(FIGURES_EVERY_S, self._window_s / 4)
        if now - followed.moved_at < 2 * self._window_s + every_s and now - followed.woken_at >= every_s:
            followed.woken_at = now
            self._changed(key)
