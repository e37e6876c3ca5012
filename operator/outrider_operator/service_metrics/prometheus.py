"""Figures from a Prometheus that scrapes the serving pods, for services with `metrics.source: Prometheus`.

Its address comes from the chart, never from a resource. One query per metric and window covers all services, so that
the load on Prometheus does not grow with their number.
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

from outrider_crds.runtime_state import TPOT_BUCKETS_S
from outrider_crds.spec import MOST_ADAPTERS

from outrider_operator.cluster_model import FigureWindows, WindowFigures
from outrider_operator.decide.figures.windows import RARE_WINDOWS, Counter, Counters, figures_of
from outrider_operator.service_metrics.proxies import is_internal
from outrider_operator.validation.reading import cut
from outrider_operator.validation.series import SERVICE_LABELS, Series, bucket, read_series
from outrider_operator.work_queue import Key

logger = logging.getLogger(__name__)

QUERY_EVERY_S = 15.0
LEAST_SCRAPES = 3
"""Least scrapes in a window: `increase` needs two, and one may be late."""
MOST_ADAPTER_SERIES = 2 * MOST_ADAPTERS
MOST_LABELLED = 16
"""Drafters or classes per service that a query returns: twice the limit of the spec, since pods of the last revision
count, too. A faulty pod may export any number."""
_BOUNDS_S = (*TPOT_BUCKETS_S, float("inf"))
_NOTHING = "no outrider_* metrics of this service, with its namespace in the label namespace that the scrape sets"

Labels = Mapping[str, str]
Query = Callable[[str], Iterable[Mapping[str, Any]]]


def _drafter(field: str) -> Callable[[Labels], Counter]:
    return lambda labels: ("drafter", labels["drafter"], field)


def _slo_class(field: str) -> Callable[[Labels], Counter]:
    return lambda labels: ("class", labels["slo_class"], field)


def _adapter(field: str) -> Callable[[Labels], Counter]:
    return lambda labels: ("adapter", labels["adapter"], field)


def _fixed(*counter: str) -> Callable[[Labels], Counter]:
    return lambda _: counter


Metrics = Mapping[str, tuple[tuple[str, ...], Callable[[Labels], Counter]]]
"""Metric -> (its labels, function that maps labels to a counter)."""

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
    "outrider_adapter_tried_total": (("adapter",), _adapter("tried")),
    "outrider_adapter_accepted_total": (("adapter",), _adapter("accepted")),
    "outrider_adapter_finished_total": (("adapter",), _adapter("finished")),
    "outrider_adapter_attained_total": (("adapter",), _adapter("attained")),
}
_TPOT = "outrider_slo_class_tpot_seconds_bucket"
_OF_REVISION: Metrics = {
    **_DRAFTERS,
    "outrider_draft_length_request_steps_total": ((), _fixed("request_steps")),
    "outrider_steps_total": ((), _fixed("steps")),
    "outrider_busy_seconds_total": ((), _fixed("busy_s")),
    "outrider_batch_squared_total": ((), _fixed("batch_squared")),
    "outrider_batch_accepted_total": ((), _fixed("batch_accepted")),
    "outrider_batch_busy_seconds_total": ((), _fixed("batch_busy_s")),
    "outrider_prompt_busy_seconds_total": ((), _fixed("prompt_busy_s")),
}
"""Counters of pods of one revision: in the next one a drafter's name may stand for another draft."""
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
    """Address and credentials of Prometheus."""

    url: str
    ca_file: str = ""
    """File with the CA bundle for its certificate; empty: the system's CAs."""
    token_file: str = ""
    """File with the bearer token; empty: none. It is read for each round of queries, since tokens rotate."""
    timeout_s: float = 10.0
    """Timeout of one query."""


class PrometheusFigures:
    """Figures of the last two windows of every service, from Prometheus."""

    def __init__(self, connection: Connection, window_s: float) -> None:
        self._connection = connection
        self._where = f"Prometheus at {connection.url}"
        self._window_s = window_s
        self._windows: dict[Key, FigureWindows] = {}
        self._error = f"{self._where} was not queried yet"

    def figures(self, key: Key) -> FigureWindows:
        """Windows of the service, or a sentence about why there are none."""
        if self._error:
            return FigureWindows(error=self._error)
        return self._windows.get(key) or FigureWindows(error=f"{self._where} has {_NOTHING}")

    async def run(self) -> None:
        """Query until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(QUERY_EVERY_S)

    async def ask(self) -> None:
        """Run one round of queries in a thread, since the library blocks."""
        try:
            self._windows = await asyncio.to_thread(self._ask)
            self._error = ""
        except Exception as error:  # the library raises its own, requests' and ValueErrors
            self._error = f"{self._where} does not answer: {_message(error)}"
            logger.warning("%s", self._error)

    def _ask(self) -> dict[Key, FigureWindows]:
        from prometheus_api_client import PrometheusConnect  # here: most operators never need it
        from requests import Session
        from urllib3.util.retry import Retry

        connection = self._connection
        with Session() as session:
            session.trust_env = not is_internal(connection.url)  # the environment's proxy is for external addresses
            session.verify = connection.ca_file or True
            if connection.token_file:
                session.headers["Authorization"] = f"Bearer {Path(connection.token_file).read_text().strip()}"
            prometheus = PrometheusConnect(
                url=connection.url, session=session, timeout=connection.timeout_s, retry=Retry(0)
            )
            return windows_of(prometheus.custom_query, self._window_s)


def _message(error: Exception) -> str:
    """The underlying cause of an error: the outer text is only the URL with the query."""
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return cut(str(cause or error) or type(error).__name__)


def windows_of(query: Query, window_s: float) -> dict[Key, FigureWindows]:
    """Both windows of every service. A window is lengthened until it contains a few scrapes."""
    stretches = _stretches(query, window_s)
    service_windows: dict[Key, FigureWindows] = {}
    for stretch in sorted(set(stretches.values())):
        if stretch > RARE_WINDOWS:
            continue
        length_s = stretch * window_s
        current, previous = _window(query, length_s, ""), _window(query, length_s, f" offset {length_s:.0f}s")
        service_windows |= {
            key: FigureWindows(current=figures, previous=previous.get(key))
            for key, figures in current.items()
            if stretches.get(key) == stretch
        }
    seldom = FigureWindows(error=_too_seldom(window_s))
    return service_windows | {key: seldom for key, stretch in stretches.items() if stretch > RARE_WINDOWS}


def _stretches(query: Query, window_s: float) -> dict[Key, int]:
    """Service -> factor by which its window must be longer, from the scrape interval of its pods.

    A young pod has few scrapes, too. A pod that is rarely scraped differs by scrapes before the window.
    """
    lately, long_s = _scrapes(query, window_s), RARE_WINDOWS * window_s
    return {key: _stretch(lately.get(key, 0), scrapes) for key, scrapes in _scrapes(query, long_s).items()}


def _stretch(lately: float, scrapes: float) -> int:
    """Factor for `lately` scrapes in one window and `scrapes` in the longest; too large if both are too few."""
    if lately >= LEAST_SCRAPES:
        return 1
    if lately == scrapes and scrapes < LEAST_SCRAPES:
        return RARE_WINDOWS + 1
    return math.ceil(LEAST_SCRAPES * RARE_WINDOWS / scrapes)


def _scrapes(query: Query, window_s: float) -> dict[Key, float]:
    """Service -> scrapes in the window of its most scraped pod."""
    by = ", ".join(SERVICE_LABELS)
    series_list = read_series(query(f"max by ({by}) (count_over_time(outrider_ready[{window_s:.0f}s]))"))
    return {_key(series): series.value for series in series_list}


def _too_seldom(window_s: float) -> str:
    return (
        f"Prometheus has fewer than {LEAST_SCRAPES} scrapes of this service's pods in {RARE_WINDOWS * window_s:.0f} s. "
        f"Unless they have only just started: scrape them every {window_s / (LEAST_SCRAPES + 1):.0f} s, or make the "
        "chart's metricsWindow longer"
    )


def _window(query: Query, window_s: float, offset: str) -> dict[Key, WindowFigures]:
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
    """Growth of each service's counters, summed over its pods."""
    gained: defaultdict[Key, dict[Counter, float]] = defaultdict(dict)
    for metric, (own_labels, counter) in metrics.items():
        most = MOST_ADAPTER_SERIES if own_labels == ("adapter",) else MOST_LABELLED
        for series in read_series(query(_most_gained(metric, window, own_labels, most)), own_labels):
            gained[_key(series)][counter(series.labels)] = series.value
    return gained


def _increases_of_revision(
    query: Query, metrics: Metrics, window: str, revisions: Mapping[Key, str]
) -> defaultdict[Key, dict[Counter, float]]:
    """Growth of each service's counters, summed over pods of `revisions` and pods that export no revision."""
    gained: defaultdict[Key, dict[Counter, float]] = defaultdict(dict)
    for metric, (own_labels, counter) in metrics.items():
        for series in read_series(query(_most_gained_by_revision(metric, window, own_labels)), own_labels):
            key = _key(series)
            if series.labels.get("revision", "") in ("", revisions.get(key, "")):
                name = counter(series.labels)
                gained[key][name] = gained[key].get(name, 0.0) + series.value
    return gained


def _followed_revisions(query: Query, offset: str) -> dict[Key, str]:
    """Service -> revision with most pods."""
    by = ", ".join((*SERVICE_LABELS, "revision"))
    counts: dict[Key, tuple[float, str]] = {}
    for series in read_series(query(f"count by ({by}) (outrider_info{offset})"), ("revision",)):
        key = _key(series)
        counts[key] = max(counts.get(key, (0.0, "")), (series.value, series.labels["revision"]))
    return {key: revision for key, (_, revision) in counts.items()}


def _most_gained_by_revision(metric: str, window: str, own_labels: tuple[str, ...]) -> str:
    """Query for a counter's growth by service, `own_labels` and revision, which a pod's outrider_info names.

    Only one outrider_info per pod is used: a pod that exports two would make the query fail for all services.
    """
    service, by = ", ".join(SERVICE_LABELS), ", ".join((*SERVICE_LABELS, *own_labels, "revision"))
    pod = "namespace, pod"
    known = f'max by ({pod}, revision) (last_over_time(outrider_info{{pod!=""}}{window}))'
    gained, info = f"increase({metric}{window})", f"topk by ({pod}) (1, {known})"
    joined = f"{gained} * on ({pod}) group_left (revision) ({info}) or {gained} unless on ({pod}) {known}"
    return f"topk by ({service}) ({MOST_LABELLED}, sum by ({by}) ({joined}))"


def _most_gained(metric: str, window: str, own_labels: tuple[str, ...], most: int) -> str:
    """Query for a counter's growth by service and `own_labels`, limited to `most` series per service."""
    service, by = ", ".join(SERVICE_LABELS), ", ".join((*SERVICE_LABELS, *own_labels))
    return f"topk by ({service}) ({most}, sum by ({by}) (increase({metric}{window})))"


def _tpot_counts(query: Query, window: str) -> dict[Key, Counters]:
    """Observations per bucket of TPOT_BUCKETS_S, from Prometheus' cumulative buckets."""
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
