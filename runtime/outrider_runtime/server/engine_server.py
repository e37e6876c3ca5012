"""Serves an engine over HTTP, vLLM or the torch engine. Requests pass a gate before they reach the engine's app.

SIGTERM drains the server: running requests finish. The server fails when the engine dies while it serves.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outrider_crds.runtime_state import AdapterState

from outrider_runtime.server.gate import App
from outrider_runtime.server.health import Phase
from outrider_runtime.server.watch import ServerView

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)
SIGNALLED = 128
"""Plus a signal's number: the exit status of a process that the signal ended, as a shell reports it."""
HEARTBEAT_INTERVAL_S = 0.5
"""Short compared with the three minutes after which a stuck event loop fails the liveness probe."""
REPEATED_SIGNAL_S = 1.0
"""A signal repeated within this time counts once: some programs signal a process and then its process group."""


class EngineDiedError(Exception):
    """The engine's process ended while the server ran."""


@dataclass(frozen=True, slots=True)
class Drain:
    """How long a server runs after SIGTERM: at once it is not ready, then it stops accepting, then it stops waiting."""

    grace_s: float
    """Seconds during which new requests are still served: proxies learn with a delay that a pod is ending."""
    timeout_s: float | None
    """Seconds that running requests may take after the grace. None: until they finish; the kubelet sets a limit."""


class ServedEngine(Protocol):
    """An engine that takes requests through an ASGI app."""

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""

    @property
    def unfinished(self) -> int:
        """Number of requests that the engine has not finished."""

    @property
    def adapters(self) -> tuple[AdapterState, ...]:
        """LoRA adapters that the engine has, or should have."""

    def http_server(self, wrap: Callable[[App], App], drain: Drain) -> uvicorn.Server:
        """Return a server of the engine's app, with the middleware `wrap` around its routes."""

    def after_serving(self, *, forced: bool) -> None:
        """Prepare the engine's end, after the HTTP server's. forced: the server did not wait for requests."""


@dataclass(slots=True)
class EngineServer:
    """Serves one engine. `view` may be called from any thread; everything else runs in the event loop."""

    wrap: Callable[[App], App]
    drain: Drain
    announce: Callable[[], None]
    """Called once, when the server begins to take requests."""
    phase: Phase = Phase.STARTING
    loop_beat: float | None = None
    """Monotonic time at which the event loop last ran, in seconds."""
    _engine: ServedEngine | None = None
    _server: uvicorn.Server | None = None
    _signalled_at: float | None = None
    _signal: int | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def view(self) -> ServerView:
        """Return what probes and metrics need to know of the server."""
        engine = self._engine
        return ServerView(
            phase=self.phase,
            engine_dead=engine is not None and engine.errored,
            unfinished=0 if engine is None else engine.unfinished,
            loop_beat=self.loop_beat,
            adapters=() if engine is None else engine.adapters,
        )

    @property
    def exit_status(self) -> int:
        """SIGNALLED + the number of the signal that ended the server; 0 without a signal.

        A kubelet that evicts a pod keeps its reason in the pod's status only when a container ends with another status
        than 0.
        """
        return 0 if self._signal is None else SIGNALLED + self._signal

    async def serve(self, starting: AbstractAsyncContextManager[ServedEngine], listener: socket.socket) -> None:
        """Load the engine and serve until a signal has drained the server.

        Raises EngineDiedError when the engine died first, and whatever the engine raises while it starts.
        """
        async with starting as engine:
            await self._serve_engine(engine, listener)
            # Ctrl-C reaches the engine's process, too. An engine that ended after a signal has drained, not died.
            died = engine.errored and self._signalled_at is None
        if died:
            raise EngineDiedError("the engine has died")

    async def _serve_engine(self, engine: ServedEngine, listener: socket.socket) -> None:
        self._engine = engine
        self._server = engine.http_server(self.wrap, self.drain)
        self._handle_signals()
        self._tasks.append(asyncio.create_task(self._beat(engine)))
        self.phase = Phase.SERVING
        self.announce()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            engine.after_serving(forced=self._server.force_exit)
            self.phase = Phase.DRAINING
            for task in self._tasks:
                task.cancel()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal, number)

    def _handle_signal(self, number: int) -> None:
        assert self._server is not None
        time_s = time.monotonic()
        if self._signalled_at is not None:
            if time_s - self._signalled_at > REPEATED_SIGNAL_S:
                logger.warning("second signal: stopping without waiting for running requests")
                self._server.force_exit = self._server.should_exit = True
            return
        self._signalled_at = time_s
        self._signal = number
        self.phase = Phase.DRAINING
        self._tasks.append(asyncio.create_task(self._drain(self._server)))

    async def _drain(self, server: uvicorn.Server) -> None:
        running = self.view().unfinished
        grace_s, timeout_s = self.drain.grace_s, self.drain.timeout_s
        limit = "until they finish" if timeout_s is None else f"for {timeout_s:.0f} s after that"
        logger.warning(
            "draining: %d requests are running, and may %s; new ones are accepted for another %.0f s",
            running, limit, grace_s,
        )  # fmt: skip
        await asyncio.sleep(grace_s)
        server.should_exit = True  # uvicorn closes the listener and waits for open requests
        if timeout_s is not None:
            await asyncio.sleep(timeout_s)
            running = self.view().unfinished
            logger.warning("drained for %.0f s, the limit: %d requests are cut off", timeout_s, running)

    async def _beat(self, engine: ServedEngine) -> None:
        """Record that the event loop runs. End the server when the engine has died: the kubelet restarts the pod."""
        while True:
            self.loop_beat = time.monotonic()
            if engine.errored and self._server is not None:
                self._server.force_exit = self._server.should_exit = True
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
