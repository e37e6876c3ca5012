"""Pages of the admin port: probes, state and metrics. The Kubernetes Service does not expose this port.

A thread of its own serves it. So probes are answered while the engine loads or the API server's event loop is busy,
and the liveness probe can report that the event loop is stuck.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from outrider_crds.runtime_config import LIVE_PATH, METRICS_PATH, READY_PATH, STATE_PATH, WHY_PATH
from outrider_crds.runtime_state import RuntimeState
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from outrider_runtime.server.health import Vitals, why_not_alive, why_not_ready
from outrider_runtime.server.page_server import PageServer, WebPage
from outrider_runtime.server.runtime_metrics import RuntimeStateCollector

logger = logging.getLogger(__name__)
PAGE_LIFETIME_S = 0.25
"""How long an answer is reused. The engine writes its state as often, so a newer answer would say the same."""


class AdminPages:
    """Answers each path of the admin port."""

    def __init__(
        self,
        vitals: Callable[[], Vitals],
        state: Callable[[], RuntimeState],
        engine_metrics: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
        decisions: Callable[[], str] = str,
    ) -> None:
        """decisions: returns the loop's most recent decisions, a line each (`/outrider/why`)."""
        self._vitals = vitals
        self._state = state
        self._registries = (engine_metrics, CollectorRegistry())
        self._registries[1].register(RuntimeStateCollector(state))
        self._pages: dict[str, Callable[[], WebPage]] = {
            LIVE_PATH: lambda: _probe(why_not_alive(self._vitals())),
            READY_PATH: lambda: _probe(why_not_ready(self._vitals())),
            STATE_PATH: _cache_answers(lambda: _json(HTTPStatus.OK, self._state().wire()), clock),
            WHY_PATH: _cache_answers(lambda: _text(HTTPStatus.OK, decisions() or "no decision yet\n"), clock),
            METRICS_PATH: _cache_answers(self._metrics, clock),
        }

    def answer(self, path: str) -> WebPage:
        """Return the page at `path`; a query string is ignored. An unknown path gets a 404 that lists the pages."""
        page = self._pages.get(path.partition("?")[0])
        if page is None:
            known = ", ".join(sorted(self._pages))
            return _json(HTTPStatus.NOT_FOUND, {"error": f"no such page; this port serves {known}"})
        return page()

    def _metrics(self) -> WebPage:
        body = b"".join(generate_latest(registry) for registry in self._registries)
        return WebPage(HTTPStatus.OK, CONTENT_TYPE_LATEST, body)


def _probe(obstacle: str) -> WebPage:
    status = HTTPStatus.SERVICE_UNAVAILABLE if obstacle else HTTPStatus.OK
    return _text(status, f"{obstacle or 'ok'}\n")


def _text(status: HTTPStatus, text: str) -> WebPage:
    return WebPage(status, "text/plain; charset=utf-8", text.encode())


def _json(status: HTTPStatus, document: Any) -> WebPage:
    return WebPage(status, "application/json", json.dumps(document).encode())


def _cache_answers(make: Callable[[], WebPage], clock: Callable[[], float]) -> Callable[[], WebPage]:
    """Call `make` at most once per `PAGE_LIFETIME_S`, so that many clients cost as much as one."""
    page: WebPage | None = None
    made_at = float("-inf")

    def answer_from_cache() -> WebPage:
        nonlocal made_at, page
        if page is None or clock() - made_at >= PAGE_LIFETIME_S:
            page = make()
            made_at = clock()
        return page

    return answer_from_cache


def serve_admin(listener: socket.socket, pages: AdminPages) -> PageServer:
    """Serve `pages` from a daemon thread, on a socket that already listens."""

    def answer(path: str) -> WebPage:
        try:
            return pages.answer(path)
        except Exception as error:  # a page that fails must not stop the thread that answers the probes
            logger.exception("admin page %s failed", path)
            return _json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

    server = PageServer(listener, answer)
    server.start()
    return server
