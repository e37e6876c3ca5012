"""A header without end, and a request that never becomes complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import Mock

import pytest
from outrider_runtime.server import request_timeouts
from outrider_runtime.server.engine_server import Drain
from outrider_runtime.torch_engine.served_engine import MAX_HEADER_BYTES, ServedTorchEngine

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


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


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """Serve `fine`, and yield the port."""
    server = ServedTorchEngine(Mock(), fine).http_server(lambda app: app, Drain(0.0, None))
    server.config.port = 0
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def test_header_over_the_limit_is_answered_with_400() -> None:
    """Bug: a header of 121 MiB was accepted, and each piece of it delayed all other requests longer."""
    async with served() as port:
        assert await status(port, 1000) == b"200"
        assert await status(port, 16 * MAX_HEADER_BYTES) == b"400"
        assert await status(port, 1000) == b"200"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", WHOLE + b"GET / HT"])
async def test_half_sent_head_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: 400 half-sent requests stayed open for ever. Other clients are answered meanwhile."""
    monkeypatch.setattr(request_timeouts, "HEAD_TIMEOUT_S", 0.5)
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await status(port, 1000) == b"200"
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                await reader.read()
        writer.transport.abort()


async def test_connection_with_whole_requests_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_timeouts, "HEAD_TIMEOUT_S", 0.2)
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(WHOLE)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.3)
        writer.transport.abort()
