"""Serve one page on a port: the operator's metrics or its health."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.Response]]

_KEEP_ALIVE_S = 5.0


@asynccontextmanager
async def serving(
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


@asynccontextmanager
async def serving_health(
    port: int, health: Callable[[], dict[str, Any]], is_stuck: Callable[[], bool]
) -> AsyncGenerator[None]:
    """Answer the kubelet's probes: status 503 while only a restart helps. kopf's own endpoint listens on one address
    family only."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"operator": health()}, status=503 if is_stuck() else 200)

    async with serving(port, "/healthz", answer):
        yield
