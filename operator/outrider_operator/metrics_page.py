"""The operator's own /metrics: whoever asks, and however often, costs the reconciles nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import prometheus_client
from aiohttp import web

AGE_S = 1.0
"""How old a page may be: with a thousand services making one takes a tenth of a second."""
_KEEP_ALIVE_S = 5.0


class MetricsPage:
    """The page's text, made off the event loop, and once for all who ask within `AGE_S`."""

    def __init__(self, make: Callable[[], bytes] = prometheus_client.generate_latest) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self._made_at = float("-inf")
        self._text = b""

    async def text(self) -> bytes:
        async with self._making:
            now = asyncio.get_running_loop().time()
            if now - self._made_at >= AGE_S:
                self._text = await asyncio.to_thread(self._make)
                self._made_at = now
            return self._text


@asynccontextmanager
async def serving(port: int) -> AsyncGenerator[None]:
    """Answer on every address; connections are asyncio's, so that an idle one holds no thread."""
    page = MetricsPage()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=await page.text(), headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get("/metrics", answer)
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=_KEEP_ALIVE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
