"""Figures from a Prometheus that scrapes the serving pods, for services with `metrics.source: Prometheus`.

The address is the chart's, never a resource's. One query a metric and window serves all services at once, so
that Prometheus' load does not grow with their number.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider_crds.state import TPOT_BUCKETS_S

from outrider_operator.model import DrafterFigures, Figures, FigureWindows, SLOClassFigures
from outrider_operator.work_queue import Key

logger = logging.getLogger(__name__)

QUERY_EVERY_S = 15.0
TIMEOUT_S = 10
_SERVICE = ("outrider_namespace", "outrider_service")

Labels = Mapping[str, str]
Series = list[tuple[Labels, float]]


@dataclass(frozen=True)
class _Metric:
    name: str
    labels: tuple[str, ...] = ()


_METRICS = {
    "output_tokens": _Metric("outrider_output_tokens_total"),
    "request_steps": _Metric("outrider_draft_length_request_steps_total"),
    "drafter_steps": _Metric("outrider_drafter_request_steps_total", ("drafter",)),
    "tried": _Metric("outrider_drafter_tried_total", ("drafter",)),
    "accepted": _Metric("outrider_drafter_accepted_total", ("drafter",)),
    "finished": _Metric("outrider_slo_class_finished_total", ("slo_class",)),
    "attained": _Metric("outrider_slo_class_attained_total", ("slo_class",)),
    "tpot": _Metric("outrider_slo_class_tpot_seconds_bucket", ("slo_class", "le")),
    "baseline_tokens": _Metric("outrider_speedup_baseline_tokens_total"),
    "baseline_s": _Metric("outrider_speedup_baseline_seconds_total"),
    "speculative_tokens": _Metric("outrider_speedup_speculative_tokens_total"),
    "speculative_s": _Metric("outrider_speedup_speculative_seconds_total"),
}


class PrometheusFigures:
    """The last two windows of every service, as Prometheus knows them."""

    def __init__(self, url: str, window_s: float) -> None:
        self._url = url
        self._window_s = window_s
        self._windows: dict[Key, FigureWindows] = {}
        self._error = "Prometheus was not asked yet"

    def figures(self, key: Key) -> FigureWindows:
        """Windows of the service; without an answer, the sentence that says why."""
        if self._error:
            return FigureWindows(error=self._error)
        windows = self._windows.get(key)
        if windows is None or windows.current is None:
            return FigureWindows(error=f"Prometheus at {self._url} has no outrider_* metrics of this service")
        return windows

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
        from prometheus_api_client import PrometheusConnect  # here: it takes 8 MB that most operators need not

        with PrometheusConnect(url=self._url, timeout=TIMEOUT_S) as prometheus:
            current, previous = (self._window(prometheus, offset_s) for offset_s in (0.0, self._window_s))
        return {key: FigureWindows(current=figures, previous=previous.get(key)) for key, figures in current.items()}

    def _window(self, prometheus: Any, offset_s: float) -> dict[Key, Figures]:
        """Figures of every service in the window that ended `offset_s` ago."""
        offset = f" offset {offset_s:.0f}s" if offset_s else ""
        answers: dict[str, dict[Key, Series]] = {}
        for name, metric in _METRICS.items():
            by = ", ".join((*_SERVICE, *metric.labels))
            query = f"sum by ({by}) (increase({metric.name}[{self._window_s:.0f}s]{offset}))"
            answers[name] = _by_service(prometheus.custom_query(query))
        pods = _by_service(prometheus.custom_query(f"count by ({', '.join(_SERVICE)}) (outrider_ready{offset})"))
        return {
            key: _figures({name: answer.get(key, []) for name, answer in answers.items()}, self._window_s, series)
            for key, series in pods.items()
        }


def _by_service(vector: Iterable[Mapping[str, Any]]) -> dict[Key, Series]:
    """The series of an instant vector, by the service they belong to; NaN (no increase known) left out."""
    services: dict[Key, Series] = defaultdict(list)
    for series in vector:
        labels, value = series["metric"], float(series["value"][1])
        if all(label in labels for label in _SERVICE) and value == value:
            services[Key(labels[_SERVICE[0]], labels[_SERVICE[1]])].append((labels, value))
    return services


def _figures(answers: Mapping[str, Series], window_s: float, pods: Series) -> Figures:
    return Figures(
        window_s=window_s,
        pods_answered=int(_total(pods)),
        output_tokens=_total(answers["output_tokens"]),
        request_steps=_total(answers["request_steps"]),
        drafters={
            name: DrafterFigures(
                tried=_of(answers["tried"], "drafter", name),
                accepted=_of(answers["accepted"], "drafter", name),
                request_steps=_of(answers["drafter_steps"], "drafter", name),
            )
            for name in _values(answers["tried"], "drafter")
        },
        slo_classes={
            name: SLOClassFigures(
                finished=_of(answers["finished"], "slo_class", name),
                attained=_of(answers["attained"], "slo_class", name),
                tpot_counts=_counts([(labels, v) for labels, v in answers["tpot"] if labels["slo_class"] == name]),
            )
            for name in _values(answers["finished"], "slo_class")
        },
        baseline_tokens=_total(answers["baseline_tokens"]),
        baseline_s=_total(answers["baseline_s"]),
        speculative_tokens=_total(answers["speculative_tokens"]),
        speculative_s=_total(answers["speculative_s"]),
    )


def _total(series: Series) -> float:
    return sum(value for _, value in series)


def _of(series: Series, label: str, wanted: str) -> float:
    return sum(value for labels, value in series if labels.get(label) == wanted)


def _values(series: Series, label: str) -> list[str]:
    return sorted({labels[label] for labels, _ in series})


def _counts(buckets: Series) -> tuple[float, ...]:
    """Observations per bucket of TPOT_BUCKETS_S from Prometheus' cumulative ones."""
    at_most = {float(labels["le"]): value for labels, value in buckets}
    cumulative = [at_most.get(bound, 0.0) for bound in (*TPOT_BUCKETS_S, float("inf"))]
    return tuple(max(0.0, value - below) for below, value in zip((0.0, *cumulative), cumulative, strict=False))
