"""The operator's pages: its metrics, and its health for the kubelet's probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import prometheus_client
from aiohttp import web

AGE_S = 1.0
"""Seconds for which the page of metrics is reused: with a thousand services it takes a tenth of a second to render."""
_KEEP_ALIVE_S = 5.0


class MetricsPage:
    """Text of the page, which is rendered in a thread at most once in `AGE_S`: scrapes do not slow down reconciles."""

    def __init__(self, make: Callable[[], bytes] = prometheus_client.generate_latest) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self._made_at = float("-inf")
        self._text = b""

    async def text(self) -> bytes:
        async with self._making:
            at = asyncio.get_running_loop().time()
            if at - self._made_at >= AGE_S:
                self._text = await asyncio.to_thread(self._make)
                self._made_at = at
            return self._text


def serving_metrics(port: int) -> AbstractAsyncContextManager[None]:
    """Answer with the metrics of this process."""
    page = MetricsPage()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=await page.text(), headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    return _serving(port, "/metrics", answer)


def serving_health(
    port: int, health: Callable[[], dict[str, Any]], is_stuck: Callable[[], bool]
) -> AbstractAsyncContextManager[None]:
    """Answer the kubelet's probes: status 503 while only a restart helps. kopf's own endpoint listens on one address
    family only."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"operator": health()}, status=503 if is_stuck() else 200)

    return _serving(port, "/healthz", answer)


@asynccontextmanager
async def _serving(
    port: int, path: str, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncGenerator[None]:
    """Serve `path` on all IPv4 and IPv6 addresses. An idle connection uses no thread."""
    application = web.Application()
    application.router.add_get(path, answer)
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=_KEEP_ALIVE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
