"""The operator as a process of this machine: quick to start, to kill and to start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.operator.client import PATIENCE_S, wait_for
from tests.operator.manifests import IMAGE
from tests.ports import free_port

NAMESPACE = "outrider-system"


class OperatorProcess:
    """`outrider-operator` with a kubeconfig."""

    def __init__(self, kubeconfig: Path, log: Path, **variables: str) -> None:
        self._log = log
        self.health_port, self.metrics_port = free_port(), free_port()
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")},
            "KUBECONFIG": str(kubeconfig),
            "OUTRIDER_NAMESPACE": NAMESPACE,
            "OUTRIDER_POD_NAME": "operator",
            "OUTRIDER_RUNTIME_IMAGE_GPU": IMAGE,
            "OUTRIDER_RUNTIME_IMAGE_CPU": IMAGE,
            "OUTRIDER_ALLOWED_HOST_PATHS": "/srv",
            "OUTRIDER_LOG_FORMAT": "plain",
            "OUTRIDER_HEALTH_PORT": str(self.health_port),
            "OUTRIDER_METRICS_PORT": str(self.metrics_port),
            **variables,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str] = (), **variables: str) -> None:
        """Return once it is alive; it may still stand by. `command` runs it in another way than installed."""
        self._environment = self._environment | variables
        command = command or [str(Path(sys.prefix) / "bin" / "outrider-operator")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        wait_for(f"the operator to be alive; see {self._log}", self._alive)

    @contextmanager
    def restarted(self, **variables: str) -> Generator[None]:
        """Run it with these variables while the block runs, and with its former ones afterwards."""
        before = self._environment
        self.stop()
        self.start(**variables)
        try:
            yield
        finally:
            self.stop()
            self._environment = before
            self.start()

    def stop(self) -> int:
        """SIGTERM, as the kubelet sends it; returns the exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        self._end(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal, and wait for nothing."""
        assert self._process is not None
        self._process.send_signal(number)

    def memory_mb(self) -> float:
        """Resident memory."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def cpu_s(self) -> float:
        """CPU time since its start."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float:
        """Sum of a metric's series."""
        page = self._fetch(f"http://127.0.0.1:{self.metrics_port}/metrics")
        lines = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def health(self) -> Any:
        """What it says of itself to the kubelet's probe."""
        return json.loads(self._fetch(f"http://127.0.0.1:{self.health_port}/healthz"))["operator"]

    def log_text(self) -> str:
        return self._log.read_text()

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _end(self, number: int) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        status = self._process.wait(timeout=PATIENCE_S)
        self._process = None
        return status

    def _alive(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the operator ended: {self._log.read_text()[-3000:]}"
        try:
            return "leading" in self.health()
        except OSError:
            return False

    def _fetch(self, url: str) -> str:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            body: bytes = answer.read()
        return body.decode()
