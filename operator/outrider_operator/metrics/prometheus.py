"""Figures from a Prometheus that scrapes the serving pods, for services with `metrics.source: Prometheus`.

The address is the chart's, never a resource's. One query a metric and window serves all services at once, so
that Prometheus' load does not grow with their number.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_crds.state import TPOT_BUCKETS_S

from outrider_operator.decide.figures.windows import RARE_WINDOWS, Counter, Counters, figures_of
from outrider_operator.inbound.reading import cut
from outrider_operator.inbound.series import SERVICE_LABELS, Series, bucket, read_series
from outrider_operator.metrics.proxies import is_internal
from outrider_operator.model import Figures, FigureWindows
from outrider_operator.work_queue import Key

logger = logging.getLogger(__name__)

QUERY_EVERY_S = 15.0
LEAST_SCRAPES = 3
"""Scrapes in a window: `increase` needs two, and one may be late."""
MOST_LABELLED = 16
"""Drafters, or classes, of a service that are asked for: twice as many as its spec may hold, for pods of the revision
before. A pod may export any number."""
_BOUNDS_S = (*TPOT_BUCKETS_S, float("inf"))
_NOTHING = "no outrider_* metrics of this service, with its namespace in the label namespace that the scrape sets"

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
    "outrider_output_tokens_total": ((), _fixed("output_tokens")),
    "outrider_slo_class_finished_total": (("slo_class",), _slo_class("finished")),
    "outrider_slo_class_attained_total": (("slo_class",), _slo_class("attained")),
    "outrider_slo_class_aborted_total": (("slo_class",), _slo_class("aborted")),
}
_TPOT = "outrider_slo_class_tpot_seconds_bucket"
_OF_REVISION: Metrics = {
    **_DRAFTERS,
    "outrider_draft_length_request_steps_total": ((), _fixed("request_steps")),
    "outrider_steps_total": ((), _fixed("steps")),
    "outrider_busy_seconds_total": ((), _fixed("busy_s")),
}
"""Counted of the pods of one revision: a drafter's name may mean another draft in the next."""
_RARE: Metrics = {
    **_OF_REVISION,
    "outrider_speculative_steps_total": ((), _fixed("speculative_steps")),
    "outrider_speedup_probes_total": ((), _fixed("probe", "count")),
    "outrider_speedup_weight_total": ((), _fixed("probe", "weight")),
    "outrider_speedup_weighted_ratio_total": ((), _fixed("probe", "weighted_ratio")),
    "outrider_speedup_baseline_tokens_total": ((), _fixed("probe", "baseline_tokens")),
    "outrider_speedup_baseline_seconds_total": ((), _fixed("probe", "baseline_s")),
    "outrider_speedup_speculative_tokens_total": ((), _fixed("probe", "speculative_tokens")),
    "outrider_speedup_speculative_seconds_total": ((), _fixed("probe", "speculative_s")),
}


@dataclass(frozen=True)
class Connection:
    """Where Prometheus is, and what it asks for."""

    url: str
    ca_file: str = ""
    """CA bundle that its certificate is checked against; the system's when empty."""
    token_file: str = ""
    """Bearer token, read anew for each round of queries: it rotates. None when empty."""
    timeout_s: float = 10.0
    """For one query."""


class PrometheusFigures:
    """The last two windows of every service, as Prometheus knows them."""

    def __init__(self, connection: Connection, window_s: float) -> None:
        self._connection = connection
        self._where = f"Prometheus at {connection.url}"
        self._window_s = window_s
        self._windows: dict[Key, FigureWindows] = {}
        self._error = f"{self._where} was not asked yet"

    def figures(self, key: Key) -> FigureWindows:
        """Windows of the service; without an answer, the sentence that says why."""
        if self._error:
            return FigureWindows(error=self._error)
        return self._windows.get(key) or FigureWindows(error=f"{self._where} has {_NOTHING}")

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(QUERY_EVERY_S)

    async def ask(self) -> None:
        """One round of queries, off the event loop: the library blocks."""
        try:
            self._windows = await asyncio.to_thread(self._ask)
            self._error = ""
        except Exception as error:  # the library raises its own, requests' and ValueErrors
            self._error = f"{self._where} does not answer: {_in_words(error)}"
            logger.warning("%s", self._error)

    def _ask(self) -> dict[Key, FigureWindows]:
        from prometheus_api_client import PrometheusConnect  # here: most operators never need it
        from requests import Session
        from urllib3.util.retry import Retry

        connection = self._connection
        with Session() as session:
            session.trust_env = not is_internal(connection.url)  # a proxy of the environment is for what lies outside
            session.verify = connection.ca_file or True
            if connection.token_file:
                session.headers["Authorization"] = f"Bearer {Path(connection.token_file).read_text().strip()}"
            prometheus = PrometheusConnect(
                url=connection.url, session=session, timeout=connection.timeout_s, retry=Retry(0)
            )
            return windows_of(prometheus.custom_query, self._window_s)


def _in_words(error: Exception) -> str:
    """Of an error with a URL, which is the query and in nobody's words, the cause beneath it."""
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return cut(str(cause or error) or type(error).__name__)


def windows_of(query: Query, window_s: float) -> dict[Key, FigureWindows]:
    """Both windows of every service, each as long as it takes for a few scrapes to lie in it."""
    stretches = _stretches(query, window_s)
    found: dict[Key, FigureWindows] = {}
    for stretch in sorted(set(stretches.values())):
        if stretch > RARE_WINDOWS:
            continue
        length_s = stretch * window_s
        current, previous = _window(query, length_s, ""), _window(query, length_s, f" offset {length_s:.0f}s")
        found |= {
            key: FigureWindows(current=figures, previous=previous.get(key))
            for key, figures in current.items()
            if stretches.get(key) == stretch
        }
    seldom = FigureWindows(error=_too_seldom(window_s))
    return found | {key: seldom for key, stretch in stretches.items() if stretch > RARE_WINDOWS}


def _stretches(query: Query, window_s: float) -> dict[Key, int]:
    """Service -> how many times as long as asked its window must be, by how often its pods are scraped.

    A young pod has few scrapes too; what tells it from one that is scraped seldom are scrapes before the window.
    """
    lately, long_s = _scrapes(query, window_s), RARE_WINDOWS * window_s
    return {key: _stretch(lately.get(key, 0), scrapes) for key, scrapes in _scrapes(query, long_s).items()}


def _stretch(lately: float, scrapes: float) -> int:
    """Windows for `lately` scrapes in one and `scrapes` in the longest. Too few in both tell nothing, not even 0."""
    if lately >= LEAST_SCRAPES:
        return 1
    if lately == scrapes and scrapes < LEAST_SCRAPES:
        return RARE_WINDOWS + 1
    return math.ceil(LEAST_SCRAPES * RARE_WINDOWS / scrapes)


def _scrapes(query: Query, window_s: float) -> dict[Key, float]:
    """Scrapes in the window of that pod of each service that has most."""
    by = ", ".join(SERVICE_LABELS)
    found = read_series(query(f"max by ({by}) (count_over_time(outrider_ready[{window_s:.0f}s]))"))
    return {_key(series): series.value for series in found}


def _too_seldom(window_s: float) -> str:
    return (
        f"Prometheus has fewer than {LEAST_SCRAPES} scrapes of this service's pods in {RARE_WINDOWS * window_s:.0f} s. "
        f"Unless they have only just started: scrape them every {window_s / (LEAST_SCRAPES + 1):.0f} s, or make the "
        "chart's metricsWindow longer"
    )


def _window(query: Query, window_s: float, offset: str) -> dict[Key, Figures]:
    """Figures of every service in the window that ended `offset` ago."""
    window, long_window = f"[{window_s:.0f}s]{offset}", f"[{RARE_WINDOWS * window_s:.0f}s]{offset}"
    revisions = _followed_revisions(query, offset)
    gained = _increases(query, _COUNTERS, window)
    for key, of_revision in _increases_of_revision(query, _OF_REVISION, window, revisions).items():
        gained[key].update(of_revision)
    rare = _increases_of_revision(query, _RARE, long_window, revisions)
    for key, counts in _tpot_counts(query, window).items():
        gained[key].update(counts)
    answered = read_series(query(f"count by ({', '.join(SERVICE_LABELS)}) (outrider_ready{offset})"))
    pods = {_key(series): int(series.value) for series in answered}
    return {
        key: figures_of(gained[key], rare[key], window_s=window_s, pods_answered=count, pods_ready=count)
        for key, count in pods.items()
    }


def _increases(query: Query, metrics: Metrics, window: str) -> defaultdict[Key, dict[Counter, float]]:
    """What each service's counters gained, summed over its pods."""
    gained: defaultdict[Key, dict[Counter, float]] = defaultdict(dict)
    for metric, (own_labels, counter) in metrics.items():
        for series in read_series(query(_most_gained(metric, window, own_labels, MOST_LABELLED)), own_labels):
            gained[_key(series)][counter(series.labels)] = series.value
    return gained


def _increases_of_revision(
    query: Query, metrics: Metrics, window: str, revisions: Mapping[Key, str]
) -> defaultdict[Key, dict[Counter, float]]:
    """What each service's counters gained in its pods of `revisions`, and in those that export no revision."""
    gained: defaultdict[Key, dict[Counter, float]] = defaultdict(dict)
    for metric, (own_labels, counter) in metrics.items():
        for series in read_series(query(_most_gained_by_revision(metric, window, own_labels)), own_labels):
            key = _key(series)
            if series.labels.get("revision", "") in ("", revisions.get(key, "")):
                name = counter(series.labels)
                gained[key][name] = gained[key].get(name, 0.0) + series.value
    return gained


def _followed_revisions(query: Query, offset: str) -> dict[Key, str]:
    """Service -> revision of most of its pods."""
    by = ", ".join((*SERVICE_LABELS, "revision"))
    counts: dict[Key, tuple[float, str]] = {}
    for series in read_series(query(f"count by ({by}) (outrider_info{offset})"), ("revision",)):
        key = _key(series)
        counts[key] = max(counts.get(key, (0.0, "")), (series.value, series.labels["revision"]))
    return {key: revision for key, (_, revision) in counts.items()}


def _most_gained_by_revision(metric: str, window: str, own_labels: tuple[str, ...]) -> str:
    """The query for a counter's gain by service, `own_labels` and revision. The pod's own outrider_info names its
    revision; one a pod, or a pod that exports two would cost every service its figures."""
    service, by = ", ".join(SERVICE_LABELS), ", ".join((*SERVICE_LABELS, *own_labels, "revision"))
    pod = "namespace, pod"
    known = f'max by ({pod}, revision) (last_over_time(outrider_info{{pod!=""}}{window}))'
    gained, info = f"increase({metric}{window})", f"topk by ({pod}) (1, {known})"
    joined = f"{gained} * on ({pod}) group_left (revision) ({info}) or {gained} unless on ({pod}) {known}"
    return f"topk by ({service}) ({MOST_LABELLED}, sum by ({by}) ({joined}))"


def _most_gained(metric: str, window: str, own_labels: tuple[str, ...], most: int) -> str:
    """The query for a counter's gain by service and `own_labels`, bounded to `most` series of each service."""
    service, by = ", ".join(SERVICE_LABELS), ", ".join((*SERVICE_LABELS, *own_labels))
    return f"topk by ({service}) ({most}, sum by ({by}) (increase({metric}{window})))"


def _tpot_counts(query: Query, window: str) -> dict[Key, Counters]:
    """Observations per bucket of TPOT_BUCKETS_S, from Prometheus' cumulative ones."""
    cumulative: defaultdict[tuple[Key, str], dict[float | None, float]] = defaultdict(dict)
    labels, most = ("slo_class", "le"), MOST_LABELLED * len(_BOUNDS_S)
    for series in read_series(query(_most_gained(_TPOT, window, labels, most)), labels):
        cumulative[_key(series), series.labels["slo_class"]][bucket(series.labels["le"])] = series.value
    counts: defaultdict[Key, dict[Counter, float]] = defaultdict(dict)
    for (key, name), at_most in cumulative.items():
        below = 0.0
        for index, bound in enumerate(_BOUNDS_S):
            value = max(below, at_most.get(bound, below))
            counts[key]["class", name, "tpot", str(index)] = value - below
            below = value
    return dict(counts)


def _key(series: Series) -> Key:
    return Key(series.namespace, series.service)
