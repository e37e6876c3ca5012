"""An engine behind HTTP, whichever it is: the gate in front of its app, a drain instead of an abort on SIGTERM, and an
exit code that says whether the engine died.
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

from outrider_runtime.server.gate import App
from outrider_runtime.server.health import Phase
from outrider_runtime.server.watch import ServerView

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)
BEAT_S = 0.5
SAME_SIGNAL_S = 1.0
"""Programs that signal a process and then its group send one signal twice."""


class EngineDiedError(Exception):
    """The engine's process ended while it served."""


@dataclass(frozen=True, slots=True)
class Drain:
    """How a server goes: first it only stops being ready, then it takes no more, then it stops waiting."""

    grace_s: float
    """New requests are still served for so long: endpoints and proxies learn of a pod's end with a delay."""
    timeout_s: float | None
    """Running requests may take so long after that; None waits as long as they do (the kubelet bounds it)."""


class Running(Protocol):
    """An engine that takes requests through its app."""

    @property
    def errored(self) -> bool:
        """It has died."""

    @property
    def unfinished(self) -> int:
        """Requests that it works on."""

    def http_server(self, wrap: Callable[[App], App], drain: Drain) -> uvicorn.Server: ...

    def served(self, *, forced: bool) -> None:
        """The HTTP server has ended; forced: without waiting for requests."""


@dataclass(slots=True)
class EngineServer:
    """One engine's app. `view` may be asked from any thread; all else runs in the event loop."""

    wrap: Callable[[App], App]
    drain: Drain
    announce: Callable[[], None]
    """Called once, when requests are taken."""
    phase: Phase = Phase.STARTING
    loop_beat: float | None = None
    _engine: Running | None = None
    _server: uvicorn.Server | None = None
    _signalled_at: float | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def view(self) -> ServerView:
        engine = self._engine
        return ServerView(
            phase=self.phase,
            engine_dead=engine is not None and engine.errored,
            unfinished=0 if engine is None else engine.unfinished,
            loop_beat=self.loop_beat,
        )

    async def serve(self, starting: AbstractAsyncContextManager[Running], listener: socket.socket) -> None:
        """Load the engine and serve until a signal has drained it. Raises EngineDiedError when the engine went first.

        What the engine raises while it starts passes through.
        """
        async with starting as engine:
            await self._serve_engine(engine, listener)
            # Ctrl-C reaches the engine's process, too: one that drained first and left has not died.
            died = engine.errored and self._signalled_at is None
        if died:
            raise EngineDiedError("the engine has died")

    async def _serve_engine(self, engine: Running, listener: socket.socket) -> None:
        self._engine = engine
        self._server = engine.http_server(self.wrap, self.drain)
        self._handle_signals()
        self._tasks.append(asyncio.create_task(self._beat(engine)))
        self.phase = Phase.SERVING
        self.announce()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            engine.served(forced=self._server.force_exit)
            self.phase = Phase.DRAINING
            for task in self._tasks:
                task.cancel()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        assert self._server is not None
        now = time.monotonic()
        if self._signalled_at is not None:
            if now - self._signalled_at > SAME_SIGNAL_S:
                logger.warning("second signal: stopping at once")
                self._server.force_exit = self._server.should_exit = True
            return
        self._signalled_at = now
        self.phase = Phase.DRAINING
        self._tasks.append(asyncio.create_task(self._drain(self._server)))

    async def _drain(self, server: uvicorn.Server) -> None:
        running = self.view().unfinished
        logger.warning("draining: %d requests run; new ones are taken for %.0f s more", running, self.drain.grace_s)
        await asyncio.sleep(self.drain.grace_s)
        server.should_exit = True  # uvicorn closes the listener and waits for open requests

    async def _beat(self, engine: Running) -> None:
        """Show that the loop runs, and end the server when the engine has died: the kubelet starts a new one."""
        while True:
            self.loop_beat = time.monotonic()
            if engine.errored and self._server is not None:
                self._server.force_exit = self._server.should_exit = True
            await asyncio.sleep(BEAT_S)
