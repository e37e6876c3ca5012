"""What is known of a service's behaviour, whichever source its spec names for the figures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from outrider_crds.spec import MetricsSource
from outrider_crds.state import RuntimeState

from outrider_operator.metrics.pods import PodStates
from outrider_operator.metrics.prometheus import PrometheusFigures
from outrider_operator.metrics.windows import figure_windows
from outrider_operator.model import FigureWindows, Object
from outrider_operator.work_queue import Key


class Measurements:
    """States always come from the pods (only they know what configuration is in force), figures from either."""

    def __init__(self, pods: PodStates, prometheus: PrometheusFigures | None, window_s: float) -> None:
        self._pods = pods
        self._prometheus = prometheus
        self._window_s = window_s

    async def run(self) -> None:
        """Keep the measurements fresh until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pods.run(), name="polls of the pods")
            if self._prometheus is not None:
                group.create_task(self._prometheus.run(), name="queries to Prometheus")

    def states(self, key: Key) -> Mapping[str, RuntimeState]:
        return self._pods.states(key)

    def expect_news(self, key: Key, expected: bool) -> None:
        """Ask the service's pods more often, or no longer."""
        self._pods.set_urgent(key, expected)

    def figures(self, key: Key, service: Object) -> FigureWindows:
        pods_ready = self._pods.pods_ready(key)
        source = ((service.get("spec") or {}).get("metrics") or {}).get("source")
        if source == MetricsSource.PROMETHEUS:
            if self._prometheus is None:
                return FigureWindows(error="the chart names no Prometheus (prometheus.url)")
            return _with_ready(self._prometheus.figures(key), pods_ready)
        return figure_windows(
            self._pods.histories(key),
            now=asyncio.get_running_loop().time(),
            window_s=self._window_s,
            pods_ready=pods_ready,
            pods_answered=len(self._pods.states(key)),
        )


def _with_ready(windows: FigureWindows, pods_ready: int) -> FigureWindows:
    current = windows.current and replace(windows.current, pods_ready=pods_ready)
    return replace(windows, current=current)
