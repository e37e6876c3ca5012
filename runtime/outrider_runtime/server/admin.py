"""The admin port: probes, state and metrics. Not behind the Service.

It is served by a thread of its own, so that a probe is answered while the engine loads and while the API server's
event loop is busy; and it can tell the kubelet that the loop is stuck.
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
from outrider_crds.state import RuntimeState
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from outrider_runtime.server.health import Vitals, why_not_alive, why_not_ready
from outrider_runtime.server.metrics import RuntimeStateCollector
from outrider_runtime.server.page_server import Page, PageServer

logger = logging.getLogger(__name__)
NEWS_S = 0.25
"""As often as the engine writes its state."""


class AdminPages:
    """What each path of the admin port answers."""

    def __init__(
        self,
        vitals: Callable[[], Vitals],
        state: Callable[[], RuntimeState],
        engine_metrics: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
        decisions: Callable[[], str] = str,
    ) -> None:
        """decisions: the last ones, a line each."""
        self._vitals = vitals
        self._state = state
        self._registries = (engine_metrics, CollectorRegistry())
        self._registries[1].register(RuntimeStateCollector(state))
        self._pages: dict[str, Callable[[], Page]] = {
            LIVE_PATH: lambda: _probe(why_not_alive(self._vitals())),
            READY_PATH: lambda: _probe(why_not_ready(self._vitals())),
            STATE_PATH: _remembered(lambda: _json(HTTPStatus.OK, self._state().wire()), clock),
            WHY_PATH: _remembered(lambda: _text(HTTPStatus.OK, decisions() or "no decision yet\n"), clock),
            METRICS_PATH: _remembered(self._metrics, clock),
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
    return _text(status, f"{obstacle or 'ok'}\n")


def _text(status: HTTPStatus, text: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", text.encode())


def _json(status: HTTPStatus, document: Any) -> Page:
    return Page(status, "application/json", json.dumps(document).encode())


def _remembered(make: Callable[[], Page], clock: Callable[[], float]) -> Callable[[], Page]:
    """`make`, called no more often than there is news: many who ask cost as much as one."""
    made_at, page = float("-inf"), None

    def remembered() -> Page:
        nonlocal made_at, page
        if page is None or clock() - made_at >= NEWS_S:
            page, made_at = make(), clock()
        return page

    return remembered


def serve_admin(listener: socket.socket, pages: AdminPages) -> PageServer:
    """Answer the admin port from a daemon thread, on a socket that already listens."""

    def answer(path: str) -> Page:
        try:
            return pages.answer(path)
        except Exception as error:  # one broken page must not take the probes with it
            logger.exception("admin page %s failed", path)
            return _json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

    server = PageServer(listener, answer)
    server.start()
    return server
