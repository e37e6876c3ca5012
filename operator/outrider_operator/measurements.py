"""What is known of a service's behaviour, whichever source its spec names for the figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider_crds.spec import MetricsSource
from outrider_crds.state import RuntimeState

from outrider_operator.cache import Cache
from outrider_operator.decide.conditions.status import FIGURES_EVERY_S
from outrider_operator.decide.figures.windows import (
    History,
    followed_revision,
    following,
    forget,
    names_of,
    record,
    windows,
)
from outrider_operator.decide.pods import revision_of
from outrider_operator.decide.revisions import revision_in
from outrider_operator.inbound.reading import label, name_of
from outrider_operator.kinds import DEPLOYMENT, SERVICE
from outrider_operator.metrics.pods import PodStates
from outrider_operator.metrics.prometheus import PrometheusFigures
from outrider_operator.metrics.state_endpoint import StateEndpoint
from outrider_operator.model import CANARY_TRACK, TRACK_LABEL, FigureWindows, Object
from outrider_operator.serving_pods import ServingPods
from outrider_operator.work_queue import Key

LOOKS_A_WINDOW = 12
"""Busy pods are asked, and what they say is recorded, so often in a window: every 5 s of a minute."""


_PODS_AT_ONCE = 64
"""Of a service, whose counters are taken in one turn of the event loop: with eight classes each some 30 ms."""


@dataclass
class _Followed:
    """A service's history, and when its figures last moved and were last looked at."""

    history: History = field(default_factory=History)
    moved_at: float = 0.0
    woken_at: float = 0.0


class Measurements:
    """States always come from the pods (only they know what configuration is in force), figures from either."""

    def __init__(
        self,
        cache: Cache,
        pods: ServingPods,
        changed: Callable[[Key], None],
        prometheus: PrometheusFigures | None,
        window_s: float,
    ) -> None:
        self._cache = cache
        self._pods = pods
        self._states = PodStates(pods, StateEndpoint(), changed, window_s / LOOKS_A_WINDOW)
        self._changed = changed
        self._prometheus = prometheus
        self._window_s = window_s
        self._histories: dict[Key, _Followed] = {}

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What keeps the measurements fresh, by name; each runs until cancelled."""
        tasks = {"polls of the pods": self._states.run, "histories": self._record}
        return tasks | ({"queries to Prometheus": self._prometheus.run} if self._prometheus is not None else {})

    async def first_round(self) -> None:
        """Return once the pods that are ready now had time to answer, so that none is taken for a silent one."""
        await self._states.first_round()

    def states(self, key: Key) -> Mapping[str, RuntimeState]:
        return self._states.states(key)

    def unheard(self, key: Key) -> Mapping[str, str]:
        """Pod name -> why its state is not known, of ready pods whose last answer was none."""
        return self._states.unheard(key)

    def expect_news(self, key: Key, expected: bool) -> None:
        """Ask the service's pods more often, or no longer."""
        self._states.set_urgent(key, expected)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a service that is gone."""
        self._states.set_urgent(key, False)
        self._histories.pop(key, None)

    def figures(self, key: Key, service: Object) -> FigureWindows:
        source = ((service.get("spec") or {}).get("metrics") or {}).get("source")
        if source == MetricsSource.PROMETHEUS:
            return self._from_prometheus(key)
        ready = self._states.ready(key)
        silent = ready and not self._states.states(key)
        error = f"none of the {ready} ready pods answers on its state endpoint" if silent else ""
        followed = self._histories.get(key, _Followed())
        return windows(followed.history, time.time(), self._window_s, error)

    def _from_prometheus(self, key: Key) -> FigureWindows:
        if self._prometheus is None:
            return FigureWindows(error="the chart names no Prometheus (prometheus.url)")
        found = self._prometheus.figures(key)
        current = found.current and replace(found.current, pods_ready=self._states.ready(key))
        return replace(found, current=current)

    async def _record(self) -> None:
        while True:
            for key in self._histories.keys() - set(self._pods.services()):
                del self._histories[key]
            for key in self._pods.services():
                await self._look(key, time.time())
                await asyncio.sleep(0)  # one service's history at a time: others must not wait for a thousand
            await asyncio.sleep(self._window_s / LOOKS_A_WINDOW)

    async def _look(self, key: Key, now: float) -> None:
        followed = self._histories.setdefault(key, _Followed(moved_at=now))
        states, ready = self._states.states(key), self._states.ready(key)
        revisions = {pod: revision for pod, revision in self._revisions(key).items() if pod in states}
        stable = {pod: revisions[pod] for pod in revisions.keys() - self._canary_pods(key)}
        history = following(followed.history, followed_revision(stable, self._newest_revision(key)))
        others = {pod for pod, revision in revisions.items() if revision != history.revision}
        names = names_of(self._cache.get(SERVICE, key.namespace, key.name))
        for pods in _batches(list(states)):
            batch = {name: states[name] for name in pods}
            history = record(history, batch, names, ready, now, self._window_s, others)
            await asyncio.sleep(0)  # nor for all pods of a large one
        if followed.history.looks and history.looks[-1].totals != followed.history.looks[-1].totals:
            followed.moved_at = now
        followed.history = forget(history, {pod.name for pod in self._pods.of(key)})
        self._wake(key, followed, now)

    def _revisions(self, key: Key) -> dict[str, str]:
        """Pod -> its revision."""
        return {name_of(pod): revision_of(pod) for pod in self._pods.documents(key)}

    def _canary_pods(self, key: Key) -> set[str]:
        """Names of pods that host two pools."""
        return {name_of(pod) for pod in self._pods.documents(key) if label(pod, TRACK_LABEL) == CANARY_TRACK}

    def _newest_revision(self, key: Key) -> str:
        return revision_in(self._cache.get(DEPLOYMENT, key.namespace, key.name))

    def _wake(self, key: Key, followed: _Followed, now: float) -> None:
        """Have the figures judged while they can change: until two windows hold no traffic any more."""
        every_s = min(FIGURES_EVERY_S, self._window_s / 4)
        if now - followed.moved_at < 2 * self._window_s + every_s and now - followed.woken_at >= every_s:
            followed.woken_at = now
            self._changed(key)


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """At least one: that no pod answered is a look, too."""
    for start in range(0, max(1, len(names)), _PODS_AT_ONCE):
        yield names[start : start + _PODS_AT_ONCE]
