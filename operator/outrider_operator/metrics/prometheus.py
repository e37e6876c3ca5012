"""Figures from a Prometheus that scrapes the serving pods, for services with `metrics.source: Prometheus`.

The address is the chart's, never a resource's. One query a metric and window serves all services at once, so
that Prometheus' load does not grow with their number.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outrider_crds.state import TPOT_BUCKETS_S

from outrider_operator.decide.figures.windows import RARE_WINDOWS, Counters, figures_of
from outrider_operator.decide.figures.windows import Key as Counter
from outrider_operator.model import Figures, FigureWindows
from outrider_operator.work_queue import Key

logger = logging.getLogger(__name__)

QUERY_EVERY_S = 15.0
TIMEOUT_S = 10
_SERVICE = ("outrider_namespace", "outrider_service")
_BOUNDS_S = (*TPOT_BUCKETS_S, float("inf"))

Labels = Mapping[str, str]
Query = Callable[[str], Iterable[Mapping[str, Any]]]


def _drafter(field: str) -> Callable[[Labels], Counter]:
    return lambda labels: ("drafter", labels["drafter"], field)


def _slo_class(field: str) -> Callable[[Labels], Counter]:
    return lambda labels: ("class", labels["slo_class"], field)


def _fixed(*counter: str) -> Callable[[Labels], Counter]:
    return lambda _: counter


Metrics = Mapping[str, tuple[tuple[str, ...], Callable[[Labels], Counter]]]
"""Metric -> (its labels, the counter that a series of it is)."""

_DRAFTERS: Metrics = {
    "outrider_drafter_request_steps_total": (("drafter",), _drafter("request_steps")),
    "outrider_drafter_tried_total": (("drafter",), _drafter("tried")),
    "outrider_drafter_accepted_total": (("drafter",), _drafter("accepted")),
}
_COUNTERS: Metrics = {
    **_DRAFTERS,
    "outrider_output_tokens_total": ((), _fixed("output_tokens")),
    "outrider_draft_length_request_steps_total": ((), _fixed("request_steps")),
    "outrider_slo_class_finished_total": (("slo_class",), _slo_class("finished")),
    "outrider_slo_class_attained_total": (("slo_class",), _slo_class("attained")),
}
_TPOT = "outrider_slo_class_tpot_seconds_bucket"
_RARE: Metrics = {
    **_DRAFTERS,
    "outrider_speedup_baseline_tokens_total": ((), _fixed("probe", "baseline_tokens")),
    "outrider_speedup_baseline_seconds_total": ((), _fixed("probe", "baseline_s")),
    "outrider_speedup_speculative_tokens_total": ((), _fixed("probe", "speculative_tokens")),
    "outrider_speedup_speculative_seconds_total": ((), _fixed("probe", "speculative_s")),
}


class PrometheusFigures:
    """The last two windows of every service, as Prometheus knows them."""

    def __init__(self, url: str, window_s: float) -> None:
        self._url = url
        self._window_s = window_s
        self._windows: dict[Key, FigureWindows] = {}
        self._error = f"Prometheus at {url} was not asked yet"

    def figures(self, key: Key) -> FigureWindows:
        """Windows of the service; without an answer, the sentence that says why."""
        if self._error:
            return FigureWindows(error=self._error)
        windows = self._windows.get(key)
        return windows or FigureWindows(error=f"Prometheus at {self._url} has no outrider_* metrics of this service")

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                self._windows = await asyncio.to_thread(self._ask)
                self._error = ""
            except Exception as error:  # the library raises its own, requests' and ValueErrors
                self._error = f"Prometheus at {self._url} does not answer: {error}"
                logger.warning("%s", self._error)
            await asyncio.sleep(QUERY_EVERY_S)

    def _ask(self) -> dict[Key, FigureWindows]:
        """Runs in a thread: the library blocks."""
        from prometheus_api_client import PrometheusConnect  # here: most operators never need it

        with PrometheusConnect(url=self._url, timeout=TIMEOUT_S) as prometheus:
            current = _window(prometheus.custom_query, self._window_s, "")
            previous = _window(prometheus.custom_query, self._window_s, f" offset {self._window_s:.0f}s")
        return {key: FigureWindows(current=figures, previous=previous.get(key)) for key, figures in current.items()}


def _window(query: Query, window_s: float, offset: str) -> dict[Key, Figures]:
    """Figures of every service in the window that ended `offset` ago."""
    gained = _increases(query, _COUNTERS, f"[{window_s:.0f}s]{offset}")
    rare = _increases(query, _RARE, f"[{RARE_WINDOWS * window_s:.0f}s]{offset}")
    for key, counts in _tpot_counts(query, f"[{window_s:.0f}s]{offset}").items():
        gained[key].update(counts)
    answered = query(f"count by ({', '.join(_SERVICE)}) (outrider_ready{offset})")
    return {
        key: figures_of(gained[key], rare[key], window_s=window_s, pods_answered=int(count), pods_ready=int(count))
        for key, _, count in _series(answered)
    }


def _increases(query: Query, metrics: Metrics, window: str) -> defaultdict[Key, dict[Counter, float]]:
    """What each service's counters gained, summed over its pods."""
    gained: defaultdict[Key, dict[Counter, float]] = defaultdict(dict)
    for metric, (own_labels, counter) in metrics.items():
        by = ", ".join((*_SERVICE, *own_labels))
        for key, labels, value in _series(query(f"sum by ({by}) (increase({metric}{window}))")):
            gained[key][counter(labels)] = value
    return gained


def _tpot_counts(query: Query, window: str) -> dict[Key, Counters]:
    """Observations per bucket of TPOT_BUCKETS_S, from Prometheus' cumulative ones."""
    cumulative: defaultdict[tuple[Key, str], dict[float, float]] = defaultdict(dict)
    by = ", ".join((*_SERVICE, "slo_class", "le"))
    for key, labels, value in _series(query(f"sum by ({by}) (increase({_TPOT}{window}))")):
        cumulative[key, labels["slo_class"]][float(labels["le"])] = value
    counts: defaultdict[Key, dict[Counter, float]] = defaultdict(dict)
    for (key, name), at_most in cumulative.items():
        below = 0.0
        for index, bound in enumerate(_BOUNDS_S):
            value = max(below, at_most.get(bound, below))
            counts[key]["class", name, "tpot", str(index)] = value - below
            below = value
    return dict(counts)


def _series(vector: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Key, Labels, float]]:
    """The series of an instant vector that belong to a service; NaN (no increase known) left out."""
    for series in vector:
        labels, value = series["metric"], float(series["value"][1])
        if all(label in labels for label in _SERVICE) and value == value:
            yield Key(labels[_SERVICE[0]], labels[_SERVICE[1]]), labels, value
