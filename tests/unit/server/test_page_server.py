"""The admin port under a flood of connections still answers a probe. Loopback only, limited in number and time."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import pytest
from outrider_runtime.server.listeners import listen
from outrider_runtime.server.page_server import PageServer, WebPage

MOST = 32
SOON_S = 30.0
"""Far beyond what an answer takes; a busy machine may be slow without being wrong."""
ATTACKER = "127.0.0.2"

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server; gives its port."""
    with contextlib.ExitStack() as stack:

        def start(deadline_s: float = SOON_S) -> int:
            listener = stack.enter_context(listen("127.0.0.1", 0, "--admin-port"))
            server = PageServer(
                listener, lambda path: WebPage(HTTPStatus.OK, "text/plain", path.encode()), MOST, deadline_s
            )
            server.start()
            stack.callback(server.stop)
            return int(listener.getsockname()[1])

        yield start


def connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SOON_S, source_address=(source, 0))


def get(port: int, path: str = "/livez") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SOON_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def closed(client: socket.socket) -> bool:
    """The server has closed it (waits until it has)."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def flood() -> Iterator[list[socket.socket]]:
    """Connections that a test opens, closed at its end."""
    opened: list[socket.socket] = []
    yield opened
    for connection in opened:
        connection.close()


@pytest.mark.slow
def test_probe_is_answered_under_a_flood_of_connections(serve: Serve, flood: list[socket.socket]) -> None:
    """A port scanner, or any pod of the cluster, must not get a serving pod restarted."""
    port, threads = serve(), threading.active_count()
    for _ in range(10 * MOST):
        flood.append(connect(port))
    assert get(port) == (200, "/livez")
    assert threading.active_count() <= threads, "a connection costs no thread"
    assert all(closed(connection) for connection in flood[:-MOST]), "the oldest made room"


@pytest.mark.slow
def test_client_that_floods_loses_its_own_connections(serve: Serve, flood: list[socket.socket]) -> None:
    """The kubelet, the operator and Prometheus come from other addresses."""
    port = serve()
    with connect(port) as patient:
        patient.sendall(b"GET /metrics HTTP/1.1\r\n")
        for _ in range(10 * MOST):
            flood.append(connect(port, ATTACKER))
        assert closed(flood[0])
        patient.sendall(b"Host: pod\r\n\r\n")
        assert patient.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"


def test_slow_client_is_closed_at_the_deadline(serve: Serve) -> None:
    """A deadline for each read would be renewed with each byte."""
    with connect(serve(deadline_s=0.2)) as client:
        client.settimeout(0.05)
        assert any(_closed_after_a_byte(client) for _ in range(200))


def _closed_after_a_byte(client: socket.socket) -> bool:
    try:
        client.sendall(b"G")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_concurrent_requests_are_all_answered(serve: Serve) -> None:
    """Fewer than the bound are never turned away."""
    port = serve()
    with ThreadPoolExecutor(MOST // 2) as pool:
        answers = list(pool.map(lambda number: get(port, f"/{number}"), range(4 * MOST)))
    assert answers == [(200, f"/{number}") for number in range(4 * MOST)]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"POST /livez HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
    ],
)
def test_malformed_request_is_refused_and_the_next_answered(serve: Serve, sent: bytes, status: int) -> None:
    """TLS, garbage and endless headers."""
    port = serve()
    with connect(port) as client:
        client.sendall(sent)
        assert client.makefile("rb").readline().split()[1] == str(status).encode()
    assert get(port) == (200, "/livez")
