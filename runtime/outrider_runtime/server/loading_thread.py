"""Runs what loads a model in a thread that does not keep a process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")
_NAME = "outrider-loading"


def is_loading() -> bool:
    """Return whether a model is being loaded. That cannot be interrupted: native code does not look for signals."""
    return any(thread.name == _NAME for thread in threading.enumerate())


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Return what `function` returns or raise what it raises. A process that gets SIGTERM does not wait for it, as
    it would for the event loop's own threads."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(outcome: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(lambda: None if result.done() else outcome())

    def run() -> None:
        try:
            value = function()
        except Exception as error:
            finish(partial(result.set_exception, error))
        else:
            finish(partial(result.set_result, value))

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return await result
