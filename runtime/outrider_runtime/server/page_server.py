"""An HTTP server for a few small pages that no client can block for others.

One thread serves all connections. Their number is limited: at the limit, a new connection closes the oldest one of the
client with the most connections. So a client with few connections, such as the kubelet, is always served. One deadline
covers a connection from start to end, so that a client that sends its bytes slowly gains nothing.

uvicorn has neither: at `limit_concurrency` it answers 503 to the next client, so idle connections fail a probe, and
it waits for the rest of a request's headers without end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Far more than the probes and scrapers of a pod open, far less than a process's file descriptors."""
DEADLINE_S = 5.0
"""Time for a request and its answer. The kubelet waits as long for a probe."""
_BACKLOG = 1024
"""Connections that wait to be accepted: asyncio's 100 are soon full in a flood, and the kernel then drops a probe's."""
_MAX_HEADER_BYTES = 8192
"""Limit of most web servers; a probe sends about 100 bytes."""


@dataclass(frozen=True, slots=True)
class WebPage:
    """An answer of the admin port."""

    status: HTTPStatus
    content_type: str
    body: bytes


Answer = Callable[[str], WebPage]
"""Turns a request's target ("/metrics?x=1") into a page. It must not block, because probes wait for it."""


class PageServer:
    """Answers GET requests with the pages of `answer`, one request per connection, from a daemon thread."""

    def __init__(
        self,
        listener: socket.socket,
        answer: Answer,
        max_connections: int = MAX_CONNECTIONS,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._max_connections = max_connections
        self._deadline_s = deadline_s
        self._open: dict[asyncio.StreamWriter, str] = {}  # connection -> the client's address, oldest first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve_until_stopped, name="outrider-admin", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the listener and every connection."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve_until_stopped(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = asyncio.start_server(self._serve, sock=self._listener, limit=_MAX_HEADER_BYTES, backlog=_BACKLOG)
        server = self._loop.run_until_complete(serving)
        self._loop.run_forever()
        server.close()
        exchanges = asyncio.all_tasks(self._loop)
        for writer in self._open:
            writer.transport.abort()
        self._loop.run_until_complete(asyncio.gather(*exchanges, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._admit(writer)
        try:
            async with asyncio.timeout(self._deadline_s):
                writer.write(_response(await self._page(reader)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError) as error:  # the client disconnected, or was too slow
            logger.debug("a request to the admin port ended early: %r", error)
        finally:
            writer.transport.abort()
            self._open.pop(writer, None)

    def _admit(self, writer: asyncio.StreamWriter) -> None:
        """Register the connection; if it is one too many, close the oldest of the client with the most connections."""
        peer = writer.get_extra_info("peername") or ("",)
        self._open[writer] = str(peer[0])
        if len(self._open) > self._max_connections:
            (largest_client, _), *_ = Counter(self._open.values()).most_common(1)
            oldest = next(connection for connection, client in self._open.items() if client == largest_client)
            del self._open[oldest]
            oldest.transport.abort()

    async def _page(self, reader: asyncio.StreamReader) -> WebPage:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _sentence(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's headers are too long")
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1"):
            return _sentence(HTTPStatus.BAD_REQUEST, "not an HTTP/1 request")
        if method != "GET":
            return _sentence(HTTPStatus.METHOD_NOT_ALLOWED, "this port answers GET only")
        return self._answer(target)


def _sentence(status: HTTPStatus, text: str) -> WebPage:
    return WebPage(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def _response(page: WebPage) -> bytes:
    lines = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + page.body
