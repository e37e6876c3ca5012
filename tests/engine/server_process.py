"""Starts `outrider-runtime serve` as a process of its own, as a pod and as a laptop do, and talks to it over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from outrider_crds.runtime_state import RuntimeState
from outrider_runtime.snapshot import WRITE_EVERY_S

from tests.engine.engines import SMALL_CACHE
from tests.ports import free_port

PATIENCE_S = 600.0
"""Timeout of all waits: a busy machine is slow, not wrong."""
SETTLED_S = 6 * WRITE_EVERY_S
"""A state that stays the same for so long, without requests, has all that was counted."""
MODEL_ROOT = Path("~/.cache/outrider/models").expanduser()
TARGET = MODEL_ROOT / "smollm2-135m-instruct"
REPETITIVE = "Repeat exactly: one two three four five one two three four five one two three four five"
"""A prompt with which prompt lookup finds something."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2-cpu.yaml"


def client_of(port: int) -> httpx.Client:
    """No connection is used twice: one that was idle for seconds ends when the server says, maybe as it is used."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, limits=limits)


class Server:
    """One server process; `log` holds what it wrote."""

    def __init__(self, log: Path, model: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self.model = model
        self.port, self.admin_port = free_port(), free_port()
        command = [sys.executable, "-m", "outrider_runtime.server.main", "serve", *arguments]
        ports = ["--port", str(self.port), "--admin-port", str(self.admin_port), "--host", "127.0.0.1"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *ports],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.api, self.admin = client_of(self.port), client_of(self.admin_port)

    def wait_until(self, what: str, holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Fails with the end of the log when it does not come true, or the process ends first."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert self.process.poll() is None, f"the server ended while waiting for {what}:\n{self.last_lines()}"
            assert time.monotonic() < deadline, f"{what} did not come true in {timeout_s:.0f} s:\n{self.last_lines()}"
            time.sleep(0.1)

    def last_lines(self, count: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def probe(self, path: str) -> int:
        """Return the status of an admin page; 0 while no server answers."""
        try:
            return self.admin.get(path).status_code
        except httpx.TransportError:
            return 0

    def is_ready(self) -> bool:
        return self.probe("/readyz") == 200

    def is_listening(self) -> bool:
        try:
            return self.api.get("/v1/models", timeout=1).status_code == 200
        except httpx.TransportError:
            return False

    def state(self) -> RuntimeState:
        return RuntimeState.model_validate_json(self.admin.get("/outrider/state").text)

    def settled_state(self) -> RuntimeState:
        """The state once no request runs and all that the engine core counted has come: its file and the server's look
        at it are as old as `WRITE_EVERY_S` each, on a busy machine older."""
        self.wait_until("an idle engine", lambda: self.metric("vllm:num_requests_running") == 0)
        states = [self.state()]

        def stands_still() -> bool:
            time.sleep(SETTLED_S)
            states.append(self.state())
            return states[-1].steps == states[-2].steps and states[-1].slo_classes == states[-2].slo_classes

        self.wait_until("a settled state", stands_still)
        return states[-1]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the metric's samples with these labels. Raises KeyError when there is none."""
        samples = [
            float(line.rsplit(" ", 1)[1])
            for line in self.admin.get("/metrics").text.splitlines()
            if re.match(rf"{name}[{{ ]", line) and all(f'{key}="{value}"' in line for key, value in labels.items())
        ]
        if not samples:
            raise KeyError(name)
        return sum(samples)

    def chat(self, content: str = "Say hi.", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        return self.api.post("/v1/chat/completions", json={**body, **fields}, headers=headers)

    def post(self, path: str, content: bytes) -> httpx.Response:
        return self.api.post(path, content=content, headers={"Content-Type": "application/json"})

    def stop(self) -> None:
        """End it and everything it started, whatever state it is in."""
        self.api.close()
        self.admin.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def boot_document(target: Path, *, extra_arguments: list[str]) -> dict[str, Any]:
    """A boot config of `target` alone, as the operator would write it for a model on the hub."""
    return {
        "schemaVersion": 1,
        "service": "alone",
        "namespace": "demo",
        "revision": "alone-1",
        "target": {"name": str(target), "source": {"hub": {}}},
        "accelerator": {"products": ["cpu"]},
        "engine": {
            "maxModelLen": 1024,
            "extraArgs": ["--max-num-seqs=4", "--enforce-eager", SMALL_CACHE, *extra_arguments],
        },
        "maxDraftTokens": 3,
    }


def write_json(file: Path, document: object) -> Path:
    """Replace `file` at once, as a ConfigMap volume does."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.replace(file)
    return file
