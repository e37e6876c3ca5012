"""A header without end is refused while it is received."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

from outrider_runtime.server.engine_server import Drain
from outrider_runtime.server.torch_backend import MAX_HEADER_BYTES, ServedTorchEngine


async def fine(scope: Any, _receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def status(port: int, header: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * header + b"\r\n\r\n")
    line = await reader.readline()
    writer.transport.abort()
    return line.split()[1]


async def test_header_over_the_limit_is_answered_with_400() -> None:
    """Bug: a header of 121 MiB was accepted, and each piece of it delayed all other requests longer."""
    server = ServedTorchEngine(Mock(), fine).http_server(lambda app: app, Drain(0.0, None))
    server.config.port = 0
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        assert await status(port, 1000) == b"200"
        assert await status(port, 16 * MAX_HEADER_BYTES) == b"400"
        assert await status(port, 1000) == b"200"
    finally:
        server.should_exit = True
        await serving
