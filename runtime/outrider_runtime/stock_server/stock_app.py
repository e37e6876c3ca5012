"""Outrider in the app of vLLM's own server: its pages, its metrics, and the SLO that a request's headers name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from outrider_crds.runtime_config import SLO_CLASS_HEADER, SLO_LIMIT_HEADERS, STATE_PATH, WHY_PATH
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric

from outrider_runtime.drafters.suffix import names_tenants
from outrider_runtime.server.admin import AdminPages
from outrider_runtime.server.gate import (
    GENERATE_PATHS,
    App,
    ClientLeftError,
    Receive,
    Scope,
    Send,
    read_in_time,
    refuse,
    replay_body,
    rewrite,
    route_path,
    with_slo_of_headers,
)
from outrider_runtime.server.health import Phase
from outrider_runtime.server.page_server import WebPage
from outrider_runtime.server.runtime_metrics import RuntimeStateCollector
from outrider_runtime.server.server_errors import RequestError
from outrider_runtime.server.strict_json import parse_object
from outrider_runtime.server.tenant_header import with_tenant
from outrider_runtime.server.vllm_backend import add_innermost
from outrider_runtime.server.watch import EngineWatch, ServerView
from outrider_runtime.snapshot import blank_state, read_decisions, read_snapshot
from outrider_runtime.stock_server.activity import Activity, survives
from outrider_runtime.stock_server.config_file import ConfigFile
from outrider_runtime.vllm_plugin.launch import LaunchPlan

_SLO_HEADERS = frozenset(name.lower().encode() for name in (SLO_CLASS_HEADER, *SLO_LIMIT_HEADERS))


class EnginePages:
    """Pages and metrics of an engine that Outrider drives."""

    def __init__(self, plan: LaunchPlan, client: Any, file: ConfigFile | None) -> None:
        """file: that of OUTRIDER_CONFIG, if there is one."""
        run_dir = plan.paths.run_dir
        blank = blank_state(plan.boot, plan.hot, started_at=time.time())
        watch = EngineWatch(read=lambda: read_snapshot(run_dir), blank=blank)
        watch.follow(lambda: ServerView(Phase.SERVING, bool(client.errored), client.get_num_unfinished_requests()))
        watch.start()
        state = watch.state if file is None else lambda: file.amend(watch.state())
        pages = AdminPages(watch.vitals, state, CollectorRegistry(), decisions=lambda: read_decisions(run_dir))
        self._pages = pages
        self._watch = watch
        REGISTRY.register(SeparateCollector(state))
        self.names_tenants = names_tenants(plan.boot.draft_pool)

    def answer(self, path: str) -> WebPage:
        return self._pages.answer(path)

    def slo_classes(self) -> Sequence[str]:
        """Return the names of the classes in the config that is in force."""
        return self._watch.gate_facts().slo_classes


class SeparateCollector(RuntimeStateCollector):
    """Outrider's metrics in vLLM's registry: an error in them leaves vLLM's own as they are."""

    def collect(self) -> Iterator[Metric]:
        metrics: list[Metric] = []
        with survives("report its metrics"):
            metrics.extend(super().collect())
        return iter(metrics)


class ServedPages(Protocol):
    """What the app needs of an engine that Outrider drives."""

    def answer(self, path: str) -> WebPage: ...
    def slo_classes(self) -> Sequence[str]: ...
    @property
    def names_tenants(self) -> bool: ...


class StockApp:
    """ASGI middleware directly around the routes of vLLM's app. All other requests pass through untouched."""

    def __init__(self, app: App, activity: Activity, pages: ServedPages | None) -> None:
        """pages: None if Outrider is not active."""
        self._app = app
        self._activity = activity
        self._pages = pages

    @classmethod
    def add_to(cls, app: Any, activity: Activity, pages: ServedPages | None) -> None:
        add_innermost(app, lambda inner: cls(inner, activity, pages))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = route_path(scope)
            if path in (STATE_PATH, WHY_PATH):
                await _send_page(await asyncio.to_thread(self._page, path), send)
                return
            if self._pages is not None and path in GENERATE_PATHS and scope["method"] == "POST":
                names_slo = any(name in _SLO_HEADERS for name, _ in scope["headers"])
                classes = self._pages.slo_classes() if names_slo else ()
                if classes or self._pages.names_tenants:
                    await self._with_arguments(classes, self._pages.names_tenants, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _page(self, path: str) -> WebPage:
        if self._pages is None:
            body = json.dumps({"error": f"Outrider is not active: {self._activity.reason}"}).encode()
            return WebPage(HTTPStatus.SERVICE_UNAVAILABLE, "application/json", body)
        return self._pages.answer(path)

    async def _with_arguments(
        self, classes: Sequence[str], tenants: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            body = await asyncio.to_thread(_rewrite_body, classes, tenants, scope, await read_in_time(receive))
        except RequestError as error:
            await refuse(error, send)
        except ClientLeftError:
            return
        else:
            await self._app(scope, replay_body(body, receive), send)


def _rewrite_body(classes: Sequence[str], tenants: bool, scope: Scope, body: bytes) -> bytes:
    """Return the body with the SLO and the tenant that the headers name. classes: none if the headers name no SLO."""
    document = parse_object(body)
    made = with_slo_of_headers(scope, document, classes, allow_other_names=True) if classes else document
    made = with_tenant(made, scope["headers"]) if tenants else made
    return body if made is document else rewrite(scope, made)


async def _send_page(page: WebPage, send: Send) -> None:
    headers = [(b"content-type", page.content_type.encode()), (b"content-length", str(len(page.body)).encode())]
    await send({"type": "http.response.start", "status": page.status.value, "headers": headers})
    await send({"type": "http.response.body", "body": page.body})
