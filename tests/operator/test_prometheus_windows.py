"""Figures from a real Prometheus with scrapes of the last hour, behind TLS and a bearer token."""

from __future__ import annotations

import asyncio
import http.server
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from outrider_operator.cluster.cache import Key
from outrider_operator.decide.figures.windows import RARE_WINDOWS
from outrider_operator.service_metrics.counter_queries import MOST_LABELLED
from outrider_operator.service_metrics.prometheus import Connection, PrometheusFigures, Query, windows_of
from prometheus_api_client import PrometheusConnect

from tests.operator.stored_prometheus import stored_prometheus

pytestmark = pytest.mark.cluster  # its binary comes with the cluster's

WINDOW_S = 60.0
RATE = 100
INTERVALS_S = (15, 30, 60, 150)
TOKEN = "t0k3n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """A Prometheus that holds one service for each scrape interval, 100 tokens a second each."""
    with stored_prometheus(tmp_path_factory.mktemp("prometheus"), _scrapes(time.time())) as started:
        yield started


@pytest.fixture(scope="module")
def query(address: str) -> Query:
    query: Query = PrometheusConnect(url=address).custom_query
    return query


@pytest.mark.parametrize(("interval_s", "length_s"), [(15, 60), (30, 120), (60, 180)])
def test_the_window_follows_the_scrape_interval(query: Query, interval_s: int, length_s: int) -> None:
    """One scrape a minute gave one per window: "0 tok/s" and NoTraffic under load."""
    windows = windows_of(query, WINDOW_S)[Key("ns", f"every-{interval_s}")]
    assert windows.error == ""
    for figures in (windows.current, windows.previous):
        assert figures is not None
        assert figures.window_s == length_s
        assert figures.gained.output_tokens / figures.window_s == pytest.approx(RATE, rel=0.02)


def test_an_interval_that_is_too_long_is_said(query: Query) -> None:
    """The error says what to do, in place of wrong figures."""
    windows = windows_of(query, WINDOW_S)[Key("ns", "every-150")]
    assert windows.current is None
    assert "scrape them every 15 s" in windows.error


@pytest.mark.parametrize("scrapes", [1, 2])
def test_the_first_scrapes_of_a_pod_are_no_figures(query: Query, scrapes: int) -> None:
    """The first look said "0 tok/s", at an interval of 60 s, where nothing is known yet."""
    windows = windows_of(query, WINDOW_S)[Key("ns", f"young-{scrapes}")]
    assert windows.current is None
    assert "fewer than 3 scrapes" in windows.error


def test_a_series_without_its_labels_costs_the_others_nothing(query: Query) -> None:
    """Pods export what they like: a drafter's counter without a drafter lost the figures of all services."""
    assert windows_of(query, WINDOW_S)[Key("ns", "every-15")].current is not None


def test_a_pod_speaks_for_services_of_its_own_namespace_only(query: Query) -> None:
    """What it exports it chooses; the namespace that the scrape adds it does not."""
    windows = windows_of(query, WINDOW_S)
    figures = windows[Key("ns", "every-15")].current
    assert figures is not None
    assert figures.gained.output_tokens / figures.window_s == pytest.approx(RATE, rel=0.02)
    assert figures.pods_answered == 1
    assert {key.namespace for key in windows} == {"ns"}


def test_made_up_drafters_are_not_all_kept(query: Query) -> None:
    """A pod may export any number of them, and the operator would hold them all."""
    figures = windows_of(query, WINDOW_S)[Key("ns", "every-30")].current
    assert figures is not None
    assert len(figures.gained.drafters) == MOST_LABELLED


def test_drafters_are_counted_of_the_revision_of_most_pods(query: Query) -> None:
    """Old and new pods of a rollout share a drafter's name, and not its draft. Tokens are those of all pods."""
    figures = windows_of(query, WINDOW_S)[Key("ns", "rolling")].current
    assert figures is not None
    seconds = figures.window_s
    assert figures.gained.drafters["eagle"].tried / seconds == pytest.approx(2 * RATE, rel=0.02)
    assert figures.gained.drafters["eagle"].accepted / seconds == pytest.approx(RATE, rel=0.02)
    assert figures.rare.steps / (RARE_WINDOWS * seconds) == pytest.approx(2 * RATE, rel=0.02)
    assert figures.gained.output_tokens / seconds == pytest.approx(3 * RATE, rel=0.02)
    assert figures.pods_answered == 3, "each pod once, however many jobs scrape it"


async def test_prometheus_behind_tls_and_a_token(address: str, tmp_path: Path) -> None:
    """The usual place of a Prometheus in a company."""
    certificate = _certificate(tmp_path)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    with _tls_proxy(address, certificate) as url:
        figures = PrometheusFigures(Connection(url, str(certificate), str(tmp_path / "token")), WINDOW_S)
        await figures.ask()
        assert figures.figures(Key("ns", "every-15")).error == ""
        without_token = PrometheusFigures(Connection(url, str(certificate)), WINDOW_S)
        await without_token.ask()
        assert "401" in without_token.figures(Key("ns", "every-15")).error
        without_ca = PrometheusFigures(Connection(url, "", str(tmp_path / "token")), WINDOW_S)
        await without_ca.ask()
        assert "certificate" in without_ca.figures(Key("ns", "every-15")).error.lower()


async def test_a_prometheus_that_does_not_answer_is_given_up_in_time() -> None:
    """And holds up nothing else meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        figures = PrometheusFigures(Connection(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=2), WINDOW_S)
        asking = asyncio.create_task(figures.ask())
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            assert not asking.done(), "the event loop waited for the answer"
            await asking
    assert "does not answer" in figures.figures(Key("ns", "any")).error


def _scrapes(at: float) -> Iterator[str]:
    """OpenMetrics text: scrapes of an hour, and of the time that the test may take."""
    yield "# TYPE outrider_ready gauge"
    for interval_s in INTERVALS_S:
        yield from _series("outrider_ready", interval_s, at, 0)
    yield from _young("outrider_ready", at, 0)
    yield from _rolling("outrider_ready", at)
    yield from _series("outrider_ready", 15, at, 0, scraped_in="mallory")
    yield "# TYPE outrider_output_tokens counter"
    for interval_s in INTERVALS_S:
        yield from _series("outrider_output_tokens_total", interval_s, at, RATE)
    yield from _young("outrider_output_tokens_total", at, RATE)
    yield from _series("outrider_output_tokens_total", 15, at, 1000 * RATE, scraped_in="mallory")
    yield from _rolling("outrider_output_tokens_total", at)
    yield "# TYPE outrider_drafter_tried counter"
    yield from _rolling("outrider_drafter_tried_total", at, ',drafter="eagle"')
    yield from _series("outrider_drafter_tried_total", 15, at, RATE)  # and no label that names the drafter
    for number in range(2 * MOST_LABELLED):
        yield from _series("outrider_drafter_tried_total", 30, at, RATE, made_up=f',drafter="made-up-{number}"')
    yield "# TYPE outrider_drafter_accepted counter"
    yield from _rolling("outrider_drafter_accepted_total", at, ',drafter="eagle"', (RATE // 2, 7 * RATE))
    yield "# TYPE outrider_steps counter"
    yield from _rolling("outrider_steps_total", at)
    yield "# TYPE outrider_info gauge"
    yield from _infos(at)


def _rolling(name: str, newest_s: float, own: str = "", rates: tuple[int, int] = (RATE, RATE)) -> Iterator[str]:
    """A service with two pods of one revision and one of the next; rates: of a pod of the first, and of the next.

    Pod a is scraped by three jobs, of which one sets no label pod.
    """
    for pod, job, rate in (("a", "monitor", rates[0]), ("a", "annotations", rates[0]), ("", "old", rates[0]),
                           ("b", "monitor", rates[0]), ("c", "monitor", rates[1])):  # fmt: skip
        where = f'job="{job}",instance="10.0.0.{pod}"' + (f',pod="{pod}"' if pod else "")
        labels = f'namespace="ns",outrider_namespace="ns",outrider_service="rolling",{where}{own}'
        for age_s in range(3600, -900, -15):
            yield f"{name}{{{labels}}} {1 + rate * (3600 - age_s)} {newest_s - age_s:.3f}"


def _infos(newest_s: float) -> Iterator[str]:
    """Pod c has another revision, and exports a second one, which it must not."""
    pods = (("a", "monitor", "r1"), ("a", "annotations", "r1"), ("b", "monitor", "r1"), ("c", "monitor", "r2"))
    for pod, job, revision in (*pods, ("c", "monitor", "r3")):
        of = f'namespace="ns",outrider_namespace="ns",outrider_service="rolling",job="{job}"'
        labels = f'{of},pod="{pod}",revision="{revision}"'
        for age_s in range(3600, -900, -15):
            yield f"outrider_info{{{labels}}} 1 {newest_s - age_s:.3f}"


def _series(
    name: str, interval_s: int, at: float, rate: int, scraped_in: str = "ns", made_up: str = ""
) -> Iterator[str]:
    labels = f'namespace="{scraped_in}",outrider_namespace="ns",outrider_service="every-{interval_s}"{made_up}'
    for age_s in range(3600, -900, -interval_s):
        yield f"{name}{{{labels}}} {1 + rate * (3600 - age_s)} {at - age_s:.3f}"


def _young(name: str, newest_s: float, rate: int) -> Iterator[str]:
    """Pods that were scraped once and twice."""
    for scrapes in (1, 2):
        labels = f'namespace="ns",outrider_namespace="ns",outrider_service="young-{scrapes}"'
        for age_s in (20, 5)[:scrapes]:
            yield f"{name}{{{labels}}} {1 + rate * (20 - age_s)} {newest_s - age_s:.3f}"


def _certificate(folder: Path) -> Path:
    """Write a self-signed certificate for 127.0.0.1 and its key."""
    certificate = folder / "ca.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=prometheus",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key", "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate


class _tls_proxy:  # noqa: N801 - used like a function
    """HTTPS in front of Prometheus, which requires the token."""

    def __init__(self, address: str, certificate: Path) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                body = b"no token"
                if allowed:
                    with urllib.request.urlopen(f"{address}{self.path}") as answer:
                        body = answer.read()
                self.send_response(200 if allowed else 401)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002
                """Silence."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_name("key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
