"""A worker of a group: it computes its share of the target's passes, and lives as long as the group's leader.

It has no API and no admin port. Where Kubernetes ends a whole group, the leader still drains: the worker goes on until
the leader is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from outrider_runtime.server.engine_server import SIGNALLED

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
CONNECT_TIMEOUT_S = 2.0  # of a look
MOST_MISSES = 5
"""Looks in a row without an answer after which the leader is gone. A busy one answers late, for its threads share cores
with the engine."""
MOST_MISSES_IN_A_DRAIN = 2
"""Such looks once the group is being ended: the leader does not come back, but may still be busy."""


def run_worker(arguments: Namespace, leader: LeaderWatch) -> None:
    """Run this node's ranks until they end. As vLLM's own headless start does, but signals are `leader`'s."""
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=True
    )
    executor = MultiprocExecutor(config, monitor_workers=False)
    leader.on_end = executor.shutdown
    executor.start_worker_monitor(inline=True)


class LeaderWatch:
    """Ends this process once the leader, which was there, answers no more; a signal alone ends it before that."""

    def __init__(self, address: str, port: int, look_every_s: float = LOOK_EVERY_S) -> None:
        self._leader = address
        self._place = (address, port)
        self._look_every_s = look_every_s
        self._was_there = False
        self._signal: int | None = None
        self.on_end: Callable[[], None] = lambda: None

    def start(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        threading.Thread(target=self._watch, name="outrider-leader-watch", daemon=True).start()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        if not self._was_there:
            self._end()

    def _watch(self) -> None:
        misses = 0
        while misses < MOST_MISSES:
            answers = self._answers()
            self._was_there |= answers
            misses = misses + 1 if self._was_there and not answers else 0
            if self._signal is not None and misses >= MOST_MISSES_IN_A_DRAIN:
                break
            time.sleep(self._look_every_s)
        self._end()

    def _answers(self) -> bool:
        """Look, and keep the address that answered: it stays for the leader's life, while name servers fail."""
        try:
            with socket.create_connection(self._place, CONNECT_TIMEOUT_S) as connection:
                self._place = connection.getpeername()[:2]
        except OSError:
            return False
        return True

    def _end(self) -> None:
        logger.warning("the leader %s is gone: this worker ends", self._leader)
        with suppress(Exception):
            self.on_end()
        logging.shutdown()
        os._exit(1 if self._signal is None else SIGNALLED + self._signal)
