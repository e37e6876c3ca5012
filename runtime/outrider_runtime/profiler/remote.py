"""Starts, uses and closes an engine process. Every way in which that process can end becomes an error message.

The engine has a process of its own because it may crash or be killed for its memory, and what was measured before must
not be lost with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO

from outrider_crds.spec import Backend

from outrider_runtime.paths import RUN_DIR_VARIABLE
from outrider_runtime.profiler import failures
from outrider_runtime.profiler.engines.measurable import ProfilerLaunch
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.host_protocol import EngineFailure, Ready, VisitOrder
from outrider_runtime.profiler.step_samples import Visit

HOST_MODULE = "outrider_runtime.profiler.host"
SILENCE_LIMIT_S = 180.0
"""Longest wait for the measurement of one shape; the engine hangs if it takes longer."""
PROGRESS_INTERVAL_S = 15.0
"""Time between two progress messages while the engine starts."""
CLOSE_S = 20.0
"""Time that the engine process gets to exit before it is killed."""
LAST_LINES = 3
"""Lines of the engine's log that an error message quotes."""


class RemoteEngine:
    """A running engine process. Methods raise ProfilingError if it dies, reports an error or stops answering."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes]) -> None:
        self._process = process
        self._connection = connection
        self._log = log

    def wait_ready(self, on_wait: Callable[[float], None]) -> Ready:
        """Wait until the engine has started, and return its facts. Meanwhile call `on_wait` with the seconds so far."""
        began = time.monotonic()
        while not self._connection.poll(PROGRESS_INTERVAL_S) and self._process.poll() is None:
            on_wait(time.monotonic() - began)
        message = self._receive(SILENCE_LIMIT_S)
        if not isinstance(message, Ready):
            raise ProfilingError(failures.ENGINE_FAILED, f"the engine process sent {message!r} instead of Ready")
        return message

    def visit(self, order: VisitOrder) -> Visit:
        """Measure one shape."""
        try:
            self._connection.send(order)
        except OSError:
            raise self._explain_death() from None
        message = self._receive(SILENCE_LIMIT_S)
        if not isinstance(message, Visit):
            raise ProfilingError(failures.ENGINE_FAILED, f"the engine process sent {message!r} instead of a Visit")
        return message

    def close(self) -> None:
        """Let the engine process exit by itself; after `CLOSE_S`, kill its process group."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Kill what is left of the process group; harmless if nothing is."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self, timeout_s: float) -> object:
        try:
            if not self._connection.poll(timeout_s):
                text = f"the engine gave no answer for {timeout_s:.0f} s; its last log lines: {self._last_lines()}"
                raise ProfilingError(failures.ENGINE_FAILED, text)
            message = self._connection.recv()
        except (EOFError, OSError):
            raise self._explain_death() from None
        if isinstance(message, EngineFailure):
            raise ProfilingError(message.reason, message.message)
        return message

    def _explain_death(self) -> ProfilingError:
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            code = None
        failed = failures.classify_exit(code, self._last_lines())
        return ProfilingError(failed.reason, failed.message)

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-LAST_LINES:])


@contextmanager
def engine(backend: Backend, launch: ProfilerLaunch, environ: Mapping[str, str] = os.environ) -> Iterator[RemoteEngine]:
    """Start an engine process; it has ended when the context ends, whatever happens."""
    environment = dict(environ)
    launch.prepare(environment)
    parent_end, host_end = Pipe()
    with tempfile.TemporaryFile(dir=environment[RUN_DIR_VARIABLE]) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", HOST_MODULE, backend.value, str(host_end.fileno())],
            env=environment, pass_fds=[host_end.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, cwd=Path.cwd(),
        )  # fmt: skip
        host_end.close()
        running = RemoteEngine(process, parent_end, log)
        try:
            yield running
            running.close()
        finally:
            running.kill()
