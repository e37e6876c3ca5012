"""Closes connections whose request never becomes complete: each holds a file, and uvicorn waits for ever.

Between the requests of a connection uvicorn's own keep-alive timeout holds; for bodies see `RequestGate`.
"""

from __future__ import annotations

import asyncio
from typing import Any

HEAD_TIMEOUT_S = 60.0
"""Time from a connection, or the first byte of its next request, to the end of the headers. Proxies that open
connections ahead of requests send one in less, or open another."""


class _HeadTimeout(asyncio.Protocol):
    """The first base class of a uvicorn protocol."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any
    """uvicorn's request that is being answered, or the last one; None before the first."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        last = self.cycle
        super().data_received(data)
        if self.cycle is not last:
            self._stop_timer()
        elif self._timer is None and self._awaits_head:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._awaits_head:
            self.transport.abort()  # a client that does not read would keep a closing connection open


def with_head_timeout(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a limit on the time that headers take."""
    return type(f"Timed{protocol.__name__}", (_HeadTimeout, protocol), {})
