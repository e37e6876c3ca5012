"""The engine process as the profiler sees it: start, measure, close; every way it can die becomes a sentence.

The engine has a process of its own because it may be aborted (native crash, out-of-memory kill), and a failing
drafter must not take along what was measured before.
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
from outrider_runtime.profiler.engines.engine import Launch
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.protocol import Ask, Failed, Ready
from outrider_runtime.profiler.samples import Visit

HOST_MODULE = "outrider_runtime.profiler.host"
SILENCE_LIMIT_S = 180.0
"""No answer for one shape in this time: the engine hangs."""
HEARTBEAT_S = 15.0
CLOSE_S = 20.0
LAST_LINES = 3


class Engine:
    """A running engine process. Raises ProfilingError when it dies, reports an error or falls silent."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes]) -> None:
        self._process = process
        self._connection = connection
        self._log = log

    def wait_ready(self, on_wait: Callable[[float], None]) -> Ready:
        """Facts of the engine once it has started; until then tells `on_wait` now and then the seconds so far."""
        began = time.monotonic()
        while not self._connection.poll(HEARTBEAT_S) and self._process.poll() is None:
            on_wait(time.monotonic() - began)
        message = self._receive(SILENCE_LIMIT_S)
        if not isinstance(message, Ready):
            raise ProfilingError(failures.ENGINE_FAILED, f"the engine process said {message!r} in place of Ready")
        return message

    def visit(self, ask: Ask) -> Visit:
        """Measure one shape."""
        try:
            self._connection.send(ask)
        except OSError:
            raise self._died() from None
        message = self._receive(SILENCE_LIMIT_S)
        if not isinstance(message, Visit):
            raise ProfilingError(failures.ENGINE_FAILED, f"the engine process said {message!r} in place of a Visit")
        return message

    def close(self) -> None:
        """Ask the engine to go, then make it; all of its process group."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End what is left of the process group; harmless when nothing is."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self, timeout_s: float) -> object:
        try:
            if not self._connection.poll(timeout_s):
                text = f"the engine gave no answer for {timeout_s:.0f} s; its last lines: {self._last_lines()}"
                raise ProfilingError(failures.ENGINE_FAILED, text)
            message = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(message, Failed):
            raise ProfilingError(message.reason, message.message)
        return message

    def _died(self) -> ProfilingError:
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            code = None
        failed = failures.of_exit(code, self._last_lines())
        return ProfilingError(failed.reason, failed.message)

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-LAST_LINES:])


@contextmanager
def engine(backend: Backend, launch: Launch, environ: Mapping[str, str] = os.environ) -> Iterator[Engine]:
    """An engine process, gone at the end whatever happens."""
    environment = dict(environ)
    launch.prepare(environment)
    ours, theirs = Pipe()
    with tempfile.TemporaryFile(dir=environment[RUN_DIR_VARIABLE]) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", HOST_MODULE, backend.value, str(theirs.fileno())],
            env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, cwd=Path.cwd(),
        )  # fmt: skip
        theirs.close()
        running = Engine(process, ours, log)
        try:
            yield running
            running.close()
        finally:
            running.kill()
