"""The operator's own /metrics: whoever asks, and however often, costs the reconciles nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import prometheus_client
from aiohttp import web

from outrider_operator import http_page

AGE_S = 1.0
"""How old a page may be: with a thousand services making one takes a tenth of a second."""


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


def serving(port: int) -> AbstractAsyncContextManager[None]:
    """Answer with the metrics of this process."""
    page = MetricsPage()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=await page.text(), headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    return http_page.serving(port, "/metrics", answer)
