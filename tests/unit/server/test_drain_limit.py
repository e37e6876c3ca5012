"""A drain ends: requests that take longer than its limit are cut off, and the log says so."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider_runtime.local_manifest import load_local_service
from outrider_runtime.server.engine_server import Drain, EngineServer
from outrider_runtime.server.listeners import listen
from outrider_runtime.torch_engine.served_engine import ServedTorchEngine

MANIFEST = """
apiVersion: outrider.dev/v1alpha1
kind: SpeculativeService
metadata: {name: chat}
spec:
  target: {name: tiny, source: {hostPath: {path: FOLDER}}}
  accelerator: {products: [cpu]}
  rollout: {drainTimeout: 45s}
"""


async def test_drain_cuts_endless_requests_off_at_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    """`serve -f` took seven minutes to end after SIGTERM, once: it waited for its requests without a limit."""
    caplog.set_level(logging.WARNING)
    accepting, arrived = asyncio.Event(), asyncio.Event()

    async def endless(scope: Any, receive: Any, _send: Any) -> None:
        """An answer that never comes, as of a request with a million tokens."""
        assert scope["type"] == "http"
        await receive()
        arrived.set()
        await asyncio.Event().wait()

    engine = ServedTorchEngine(SimpleNamespace(errored=False, unfinished=1), endless)  # type: ignore[arg-type]

    @asynccontextmanager
    async def started() -> AsyncIterator[ServedTorchEngine]:
        yield engine

    server = EngineServer(wrap=lambda app: app, drain=Drain(0.0, 1.0), announce=accepting.set)
    with listen("127.0.0.1", 0, "--port") as listener:
        serving = asyncio.create_task(server.serve(started(), listener))
        await accepting.wait()
        _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(arrived.wait(), 60)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        writer.transport.abort()
    assert server.exit_status == 128 + signal.SIGTERM
    assert "drained for 1 s, the limit: 1 requests are cut off" in caplog.text


def test_manifest_on_a_laptop_has_the_limit_of_a_pod(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    manifest = tmp_path / "chat.yaml"
    manifest.write_text(MANIFEST.replace("FOLDER", str(tmp_path)))
    assert load_local_service(manifest).drain_timeout_s == 45.0
