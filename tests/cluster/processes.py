"""The supervisor's children: started, watched, reaped. The supervisor is process 1 of its namespace."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.errors import ClusterError

_LAST_LINES = 15


class Processes:
    """Long-running programs by name, each with its log."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        """Start it; its output is appended to its log."""
        if name in self._running and self._running[name].poll() is None:
            raise ClusterError(f"{name} is running already.")
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env
            )

    def kill(self, name: str) -> None:
        """End it at once, as a crash would."""
        process = self._running.pop(name, None)
        if process is None:
            raise ClusterError(f"{name} does not run; these do: {', '.join(sorted(self._running))}.")
        process.kill()
        process.wait()

    def wait_until(self, what: str, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll every 50 ms; ClusterError when a process died meanwhile, or after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.assert_all_run()
            if time.monotonic() > deadline:
                raise ClusterError(f"{what} was not there after {timeout_s:.0f} s; see the logs in {self._logs}.")
            time.sleep(0.05)

    def assert_all_run(self) -> None:
        """ClusterError with a dead process's last lines."""
        for name, status in self.dead().items():
            lines = self._log(name).read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise ClusterError(f"{name} ended with {status}. Its last lines:\n  " + "\n  ".join(lines))

    def dead(self) -> dict[str, int]:
        """Exit status of each process that should run and does not."""
        return {name: status for name, child in self._running.items() if (status := child.poll()) is not None}

    def names(self) -> list[str]:
        return sorted(self._running)

    def reap_orphans(self) -> None:
        """Reap orphans that fell to process 1 (containers' shims), but none of our own children."""
        own = {child.pid for child in self._running.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in own:
                    self.dead()  # poll() collects it
                else:
                    os.waitpid(ended.si_pid, 0)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def run(command: Sequence[str], stdin: str | None = None) -> str:
    """Run a short command; ClusterError with its error output."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(command[:6])}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ignore_terminal() -> None:
    """Ctrl-C belongs to the cluster's owner, which ends the cluster as a whole."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
