"""States and figures of all services, from the source that each spec names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider_crds.prefetch_report import PrefetchProgress
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import MetricsSource

from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.cluster_model import CANARY_TRACK, GROUPS_LABEL, TRACK_LABEL, Object
from outrider_operator.decide.desired.revisions import revision_in
from outrider_operator.decide.figures.windows import (
    History,
    followed_revision,
    following,
    forget,
    names_of,
    record,
    windows,
)
from outrider_operator.decide.pods.pod_states import revision_of
from outrider_operator.decide.status_changes import FIGURES_EVERY_S
from outrider_operator.figure_windows import FigureWindows
from outrider_operator.kinds import DEPLOYMENT, SERVICE
from outrider_operator.service_metrics.pod_polls import PodStates, StateEndpoint
from outrider_operator.service_metrics.prometheus import PrometheusFigures
from outrider_operator.validation.reading import created_s, label, name_of

SNAPSHOTS_PER_WINDOW = 12
"""Snapshots per window, for which busy pods are polled: every 5 s of a minute."""
_PODS_AT_ONCE = 64
"""Pods whose counters are recorded in one turn of the event loop: with eight SLO classes each it takes some 30 ms."""


@dataclass
class _Followed:
    """History of a service, and the times when its totals last changed and when its figures last woke it."""

    history: History = field(default_factory=History)
    moved_at: float = 0.0
    woken_at: float = 0.0


class Measurements:
    """States of pods, and figures from the pods or from Prometheus.

    States always come from the pods, which alone know the config that is in force.
    """

    def __init__(
        self,
        cache: ObjectCache,
        pods: ServingPods,
        changed: Callable[[Key], None],
        prometheus: PrometheusFigures | None,
        window_s: float,
    ) -> None:
        self._cache = cache
        self.pods = pods
        self._endpoint = StateEndpoint()
        self._states = PodStates(pods, self._endpoint, changed, window_s / SNAPSHOTS_PER_WINDOW)
        self._changed = changed
        self._prometheus = prometheus
        self._window_s = window_s
        self._histories: dict[Key, _Followed] = {}

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Background tasks by name. Each runs until cancelled."""
        tasks = {"polls of the pods": self._states.run, "histories": self._record}
        return tasks | ({"queries to Prometheus": self._prometheus.run} if self._prometheus is not None else {})

    async def first_round(self) -> None:
        """Return once the pods that are ready now had time to answer, so that none counts as unreachable too early."""
        await self._states.first_round()

    def states(self, key: Key) -> Mapping[str, RuntimeState]:
        return self._states.states(key)

    def unreachable(self, key: Key) -> Mapping[str, str]:
        """Pod name -> error of the last poll, for ready pods that did not answer it."""
        return self._states.unreachable(key)

    async def prefetch(self, address: str) -> PrefetchProgress | None:
        """What the pod at `address` reports of its download."""
        return await self._endpoint.prefetch(address)

    def expect_news(self, key: Key, expected: bool) -> None:
        """Poll the service's pods more often, or stop that."""
        self._states.set_urgent(key, expected)

    def forget(self, key: Key) -> None:
        """Remove all state about a service that is gone."""
        self._states.set_urgent(key, False)
        self._histories.pop(key, None)

    def figures(self, key: Key, service: Object) -> FigureWindows:
        source = ((service.get("spec") or {}).get("metrics") or {}).get("source")
        if source == MetricsSource.PROMETHEUS:
            return self._from_prometheus(key)
        ready = self._states.ready(key)
        is_silent = ready and not self._states.states(key)
        error = f"none of the {ready} ready pods answers on its state endpoint" if is_silent else ""
        followed = self._histories.get(key, _Followed())
        return windows(followed.history, time.time(), self._window_s, error)

    def _from_prometheus(self, key: Key) -> FigureWindows:
        if self._prometheus is None:
            return FigureWindows(error="the chart names no Prometheus (prometheus.url)")
        service_windows = self._prometheus.figures(key)
        current = service_windows.current and replace(service_windows.current, pods_ready=self._states.ready(key))
        return replace(service_windows, current=current)

    async def _record(self) -> None:
        while True:
            for key in self._histories.keys() - set(self.pods.services()):
                del self._histories[key]
            for key in self.pods.services():
                await self._look(key, time.time())
                await asyncio.sleep(0)  # one service per turn of the event loop, which must not wait for a thousand
            await asyncio.sleep(self._window_s / SNAPSHOTS_PER_WINDOW)

    async def _look(self, key: Key, at: float) -> None:
        followed = self._histories.setdefault(key, _Followed(moved_at=at))
        states, ready = self._states.states(key), self._states.ready(key)
        revisions = {pod: revision for pod, revision in self._revisions(key).items() if pod in states}
        stable = {pod: revisions[pod] for pod in revisions.keys() - self._canary_pods(key)}
        history = following(followed.history, followed_revision(stable, self._newest_revision(key)))
        others = {pod for pod, revision in revisions.items() if revision != history.revision}
        names = names_of(self._cache.get(SERVICE, key.namespace, key.name))
        for pods in _batches(list(states)):
            batch = {name: states[name] for name in pods}
            history = record(history, batch, names, ready, at, self._window_s, others)
            await asyncio.sleep(0)  # one batch per turn of the event loop
        if followed.history.snapshots and history.snapshots[-1].totals != followed.history.snapshots[-1].totals:
            followed.moved_at = at
        followed.history = forget(history, {pod.name for pod in self.pods.of(key)})
        self._wake(key, followed, at)

    def _revisions(self, key: Key) -> dict[str, str]:
        """Pod name -> its revision."""
        return {name_of(pod): revision_of(pod) for pod in self.pods.documents(key)}

    def _canary_pods(self, key: Key) -> set[str]:
        """Names of pods that host two pools."""
        return {name_of(pod) for pod in self.pods.documents(key) if label(pod, TRACK_LABEL) == CANARY_TRACK}

    def _newest_revision(self, key: Key) -> str:
        """Revision of the Deployment; where groups serve, that of the leader that was made last."""
        leaders = [pod for pod in self.pods.documents(key) if label(pod, GROUPS_LABEL)]
        newest = max(leaders, key=created_s, default=None)
        return revision_of(newest) if newest else revision_in(self._cache.get(DEPLOYMENT, key.namespace, key.name))

    def _wake(self, key: Key, followed: _Followed, at: float) -> None:
        """Wake the service while its figures can change, that is until two windows have no traffic."""
        every_s = min(FIGURES_EVERY_S, self._window_s / 4)
        if at - followed.moved_at < 2 * self._window_s + every_s and at - followed.woken_at >= every_s:
            followed.woken_at = at
            self._changed(key)


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Batches of pod names; at least one, since a snapshot without pods counts, too."""
    for start in range(0, max(1, len(names)), _PODS_AT_ONCE):
        yield names[start : start + _PODS_AT_ONCE]
