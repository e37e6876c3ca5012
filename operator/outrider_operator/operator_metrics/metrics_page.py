"""The operator's own /metrics. Frequent scrapes do not slow down reconciles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import prometheus_client
from aiohttp import web

from outrider_operator import http_page

AGE_S = 1.0
"""Seconds for which a page is reused: with a thousand services it takes a tenth of a second to render."""


class MetricsPage:
    """Text of the page, which is rendered in a thread at most once in `AGE_S`."""

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


def serving(port: int) -> AbstractAsyncContextManager[None]:
    """Answer with the metrics of this process."""
    page = MetricsPage()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=await page.text(), headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    return http_page.serving(port, "/metrics", answer)
