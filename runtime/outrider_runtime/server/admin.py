"""The admin port: probes, state and metrics. Not behind the Service.

It is served by threads of its own, so that a probe is answered while the engine loads and while the API server's
event loop is busy; and it can tell the kubelet that the loop is stuck.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outrider_crds.runtime_config import LIVE_PATH, METRICS_PATH, READY_PATH, STATE_PATH
from outrider_crds.state import RuntimeState
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from outrider_runtime.server.health import Vitals, why_not_alive, why_not_ready
from outrider_runtime.server.metrics import RuntimeStateCollector

logger = logging.getLogger(__name__)
_SLOW_CLIENT_S = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    status: HTTPStatus
    content_type: str
    body: bytes


class AdminPages:
    """What each path of the admin port answers."""

    def __init__(
        self,
        vitals: Callable[[], Vitals],
        state: Callable[[], RuntimeState],
        engine_metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        self._vitals = vitals
        self._state = state
        self._registries = (engine_metrics, CollectorRegistry())
        self._registries[1].register(RuntimeStateCollector(state))
        self._pages: dict[str, Callable[[], Page]] = {
            LIVE_PATH: lambda: _probe(why_not_alive(self._vitals())),
            READY_PATH: lambda: _probe(why_not_ready(self._vitals())),
            STATE_PATH: lambda: _json(HTTPStatus.OK, self._state().wire()),
            METRICS_PATH: self._metrics,
        }

    def answer(self, path: str) -> Page:
        page = self._pages.get(path.partition("?")[0])
        if page is None:
            known = ", ".join(sorted(self._pages))
            return _json(HTTPStatus.NOT_FOUND, {"error": f"no such page; this port serves {known}"})
        return page()

    def _metrics(self) -> Page:
        body = b"".join(generate_latest(registry) for registry in self._registries)
        return Page(HTTPStatus.OK, CONTENT_TYPE_LATEST, body)


def _probe(obstacle: str) -> Page:
    status = HTTPStatus.SERVICE_UNAVAILABLE if obstacle else HTTPStatus.OK
    return Page(status, "text/plain; charset=utf-8", f"{obstacle or 'ok'}\n".encode())


def _json(status: HTTPStatus, document: Any) -> Page:
    return Page(status, "application/json", json.dumps(document).encode())


class _AdminServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, _request: object, client_address: object) -> None:
        """A client that hangs up is no event; the base class prints a traceback."""
        logger.debug("admin request from %s ended early", client_address, exc_info=True)


def serve_admin(listener: socket.socket, pages: AdminPages) -> ThreadingHTTPServer:
    """Answer the admin port from a daemon thread, on a socket that already listens."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _SLOW_CLIENT_S

        def do_GET(self) -> None:
            page = self._page()
            self.send_response(page.status)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(page.body)))
            self.end_headers()
            self.wfile.write(page.body)

        def _page(self) -> Page:
            try:
                return pages.answer(self.path)
            except Exception as error:  # one broken page must not take the probes with it
                logger.exception("admin page %s failed", self.path)
                return _json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
            """Probes come every few seconds; they are not worth a line each."""

    server = _AdminServer(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()  # the one that the base class made; ours is bound already
    server.socket = listener
    threading.Thread(target=server.serve_forever, name="outrider-admin", daemon=True).start()
    return server
