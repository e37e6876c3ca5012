"""An HTTP server for a few small pages that no client can exhaust.

One thread serves every connection, so a flood costs no threads. Connections are bounded: where one too many comes, the
oldest of the client that holds the most is closed, so that a client who asks at once (the kubelet) is always served.
A connection has one deadline from its first byte to its last, so that dripping bytes holds nothing for long.
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

MOST_CONNECTIONS = 256
DEADLINE_S = 5.0
"""For a whole exchange; the kubelet gives up after as long."""
_MOST_HEADER_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Page:
    status: HTTPStatus
    content_type: str
    body: bytes


Answer = Callable[[str], Page]
"""From a request's target ("/metrics?x=1"). It must not block: probes wait for it."""


class PageServer:
    """Answers GET with what `answer` says, one request a connection, from a daemon thread until it is stopped."""

    def __init__(
        self,
        listener: socket.socket,
        answer: Answer,
        most_connections: int = MOST_CONNECTIONS,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._most_connections = most_connections
        self._deadline_s = deadline_s
        self._open: dict[asyncio.StreamWriter, str] = {}  # to the client's address, oldest first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="outrider-admin", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the listener and every connection."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = asyncio.start_server(self._serve, sock=self._listener, limit=_MOST_HEADER_BYTES)
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
        except (OSError, EOFError, TimeoutError) as error:  # the client left, or was too slow
            logger.debug("admin request ended early: %r", error)
        finally:
            writer.transport.abort()
            self._open.pop(writer, None)

    def _admit(self, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername") or ("",)
        self._open[writer] = str(peer[0])
        if len(self._open) > self._most_connections:
            (greediest, _), *_ = Counter(self._open.values()).most_common(1)
            oldest = next(each for each, address in self._open.items() if address == greediest)
            del self._open[oldest]
            oldest.transport.abort()

    async def _page(self, reader: asyncio.StreamReader) -> Page:
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


def _sentence(status: HTTPStatus, text: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def _response(page: Page) -> bytes:
    lines = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + page.body
