"""Figures from a Prometheus that scrapes the serving pods, for services with `metrics.source: Prometheus`.

Its address comes from the chart, never from a resource. One query per metric and window covers all services, so that
the load on Prometheus does not grow with their number.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outrider_crds.counters import (
    HistogramState,
    SpeedupCounters,
)
from outrider_crds.runtime_state import ServiceCounters

from outrider_operator.cluster.cache import Key
from outrider_operator.decide.figures.windows import RARE_WINDOWS
from outrider_operator.figure_windows import FigureWindows, WindowCounts
from outrider_operator.service_metrics.counter_queries import (
    BOUNDS_S,
    BY_SERVICE,
    NEEDED,
    OF_WINDOW,
    RARE,
    TPOT,
    NeededCounter,
    gain,
    gain_by_revision,
    once,
)
from outrider_operator.validation.reading import cut
from outrider_operator.validation.reports import Series, bucket, read_series

logger = logging.getLogger(__name__)

QUERY_EVERY_S = 15.0
LEAST_SCRAPES = 3
"""Least scrapes in a window: `increase` needs two, and one may be late."""
_NOTHING = "no outrider_* metrics of this service, with its namespace in the label namespace that the scrape sets"

Query = Callable[[str], Iterable[Mapping[str, Any]]]
Rows = Mapping[tuple[str, str, str], float]
"""(field of `ServiceCounters`, key in it, counter) -> its growth; field and key are empty where it has none."""


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
        """Run one round of queries in a thread with a client of its own: to parse the series of a thousand services on
        the event loop would hold up aiohttp, which polls the pods there."""
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
    series_list = read_series(query(f"max by ({BY_SERVICE}) (count_over_time(outrider_ready[{window_s:.0f}s]))"))
    return {_key(series): series.value for series in series_list}


def _too_seldom(window_s: float) -> str:
    return (
        f"Prometheus has fewer than {LEAST_SCRAPES} scrapes of this service's pods in {RARE_WINDOWS * window_s:.0f} s. "
        f"Unless they have only just started: scrape them every {window_s / (LEAST_SCRAPES + 1):.0f} s, or make the "
        "chart's metricsWindow longer"
    )


def _window(query: Query, window_s: float, offset: str) -> dict[Key, WindowCounts]:
    """Counts of every service in the window that ended `offset` ago."""
    window, long_window = f"[{window_s:.0f}s]{offset}", f"[{RARE_WINDOWS * window_s:.0f}s]{offset}"
    revisions = _followed_revisions(query, offset)
    gained = _rows(query, OF_WINDOW, window, revisions)
    rare = _rows(query, RARE, long_window, revisions)
    tpot = _tpot_counts(query, window)
    answered = read_series(query(f"count by ({BY_SERVICE}) ({once('outrider_ready', offset)})"))
    return {
        (key := _key(series)): WindowCounts(
            window_s, int(series.value), int(series.value), _counters(gained[key], tpot[key]), _counters(rare[key], {})
        )
        for series in answered
    }


def _rows(
    query: Query, counters: Iterable[NeededCounter], window: str, revisions: Mapping[Key, str]
) -> defaultdict[Key, defaultdict[tuple[str, str, str], float]]:
    """Growth of each service's counters, summed over its pods; of some counters over pods of `revisions` alone, and
    pods that export no revision."""
    gained: defaultdict[Key, defaultdict[tuple[str, str, str], float]] = defaultdict(lambda: defaultdict(float))
    for counter in counters:
        text = gain(counter, window) if counter.of_every_revision else gain_by_revision(counter, window)
        for series in read_series(query(text), counter.keys):
            if series.labels.get("revision", "") in ("", revisions.get(_key(series), "")):
                row = counter.field, series.labels.get(counter.metric.group.label, ""), counter.name
                gained[_key(series)][row] += series.value
    return gained


def _counters(rows: Rows, tpot_counts: Mapping[str, list[float]]) -> ServiceCounters:
    """The counters in `rows`. tpot_counts: observations by class and bucket."""
    fields: defaultdict[str, defaultdict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for (field, key, name), value in rows.items():
        default = NEEDED[field][0].model_fields[name].default
        # Prometheus has added up the lengths of drafts and the classes of an adapter already.
        fields[field][key][name] = [value] if default == [] else {"": value} if default == {} else value
    for slo_class, counts in tpot_counts.items():
        fields["slo_classes"][slo_class]["tpot"] = HistogramState(counts=[]).model_copy(update={"counts": counts})
    made: dict[str, Any] = {
        field: {key: NEEDED[field][0]().model_copy(update=counted) for key, counted in keyed.items()}
        for field, keyed in fields.items()
        if field
    }
    speedup = made.pop("speedup", {}).get("", SpeedupCounters())
    return ServiceCounters().model_copy(update={**fields[""][""], **made, "speedup": speedup})


def _followed_revisions(query: Query, offset: str) -> dict[Key, str]:
    """Service -> revision with most pods."""
    counts: dict[Key, tuple[float, str]] = {}
    counting = f"count by ({BY_SERVICE}, revision) ({once('outrider_info', offset, 'revision')})"
    for series in read_series(query(counting), ("revision",)):
        key = _key(series)
        counts[key] = max(counts.get(key, (0.0, "")), (series.value, series.labels["revision"]))
    return {key: revision for key, (_, revision) in counts.items()}


def _tpot_counts(query: Query, window: str) -> defaultdict[Key, dict[str, list[float]]]:
    """Observations per class and bucket of TPOT_BUCKETS_S, from Prometheus' cumulative buckets."""
    cumulative: defaultdict[tuple[Key, str], dict[float | None, float]] = defaultdict(dict)
    for series in read_series(query(gain(TPOT, window, "le", suffix="_bucket")), ("slo_class", "le")):
        cumulative[_key(series), series.labels["slo_class"]][bucket(series.labels["le"])] = series.value
    counts: defaultdict[Key, dict[str, list[float]]] = defaultdict(dict)
    for (key, name), at_most in cumulative.items():
        totals = list(accumulate((at_most.get(bound, 0.0) for bound in BOUNDS_S), max))
        counts[key][name] = [total - below for below, total in zip((0.0, *totals), totals, strict=False)]
    return counts


def _key(series: Series) -> Key:
    return Key(series.namespace, series.service)


def is_internal(url: str) -> bool:
    """True if every address of the URL's host is private: a Service, a pod, or a host of the same network.

    NO_PROXY is not enough: Python compares it as text, so neither 10.0.0.0/8 nor a Service's short name matches. A host
    that cannot be resolved here counts as external. Blocks while the name is resolved.
    """
    try:
        addresses = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(not ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in addresses)
