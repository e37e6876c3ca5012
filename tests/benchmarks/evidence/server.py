"""One system's server as a process of its own: vLLM's own server, or `outrider-runtime serve`; and what it uses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from outrider_runtime.local_manifest import DEFAULT_MODEL_ROOT, load_local_service
from outrider_runtime.vllm_plugin import cpu, launch
from outrider_runtime.vllm_plugin.arguments import engine_arguments, speculative_config
from outrider_runtime.vllm_plugin.environment import RUN_DIR_VARIABLE, engine_environment

from tests.benchmarks.evidence.prompts import REPOSITORY

START_S = 300.0
STOP_S = 60.0
OURS_ONLY = ("--scheduler-cls", "--worker-cls", "--speculative-config", "--port", "--no-async-scheduling")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
MODEL_ROOT = DEFAULT_MODEL_ROOT.expanduser()


class ServerError(RuntimeError):
    """A server that did not start or that ended; the message holds the end of its log."""


class Server:
    """A launched server. Use as a context manager: it is Ready inside and gone afterwards."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path, ports: tuple[int, int]) -> None:
        self._log = log
        self.base_url = f"http://127.0.0.1:{ports[0]}"
        self._admin = f"http://127.0.0.1:{ports[1]}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment},
                start_new_session=True, cwd=REPOSITORY,
            )  # fmt: skip

    def __enter__(self) -> Server:
        self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        """Raises ServerError when it ends before, or takes longer than START_S; it is gone then: half a server takes
        memory and time from those that are measured."""
        deadline = time.monotonic() + START_S
        try:
            while not self._answers():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(f"the server did not start; the end of {self._log}:\n{self._last_lines()}")
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def process_id(self) -> int:
        """It leads the process group of all that it started."""
        return self._process.pid

    def pause(self) -> None:
        """No time for it until it is `awake`: an idle server polls, and that breaks into another one's steps."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Paused again afterwards. Raises ServerError when it has ended."""
        self.check_alive()
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.pause()

    def state(self) -> dict[str, Any] | None:
        """What the controller says of itself; None of stock vLLM, which has none."""
        try:
            answer = httpx.get(f"{self._admin}/outrider/state", timeout=10)
        except httpx.TransportError:
            return None
        found: dict[str, Any] = answer.json()
        return found

    def check_alive(self) -> None:
        """Raises ServerError when it has ended."""
        if self._process.poll() is not None:
            raise ServerError(f"the server ended under load; the end of {self._log}:\n{self._last_lines()}")

    def memory_mb(self) -> float:
        """Of all its processes; pages that they share count once (PSS)."""
        return sum(_pss_kb(process) for process in _group(self._process.pid)) / 1024

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        return sum(_cpu_s(process) for process in _group(self._process.pid))

    def stop(self) -> None:
        """It and everything it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + STOP_S
        while _group(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)  # its memory and its cores are the next system's

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/v1/models", timeout=2).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _last_lines(self, count: int = 25) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-count:])


def start_ours(manifest: Path, profiles: Path, log: Path, environment: Mapping[str, str]) -> Server:
    ports = _free_port(), _free_port()
    command = [
        sys.executable, "-m", "outrider_runtime.server.main", "serve", "-f", str(manifest),
        "--model-root", str(MODEL_ROOT), "--profiles", str(profiles), "--host", "127.0.0.1",
        "--port", str(ports[0]), "--admin-port", str(ports[1]),
    ]  # fmt: skip
    return Server(command, {**_environment(manifest), **environment}, log, ports)


def start_stock(
    manifest: Path, speculative: Mapping[str, Any] | None, log: Path, environment: Mapping[str, str]
) -> Server:
    """vLLM's own server with the manifest's engine settings and this speculative config; nothing of ours is in it."""
    ports = _free_port(), _free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={ports[0]}",
        *stock_arguments(_plan(manifest), speculative),
    ]  # fmt: skip
    return Server(command, {**_environment(manifest), "VLLM_PLUGINS": "", **environment}, log, ports)


def stock_arguments(plan: launch.LaunchPlan, speculative: Mapping[str, Any] | None) -> list[str]:
    """What ours is started with, less what makes it ours."""
    model, *arguments = engine_arguments(plan)
    kept = [one for one in arguments if not one.startswith(OURS_ONLY)]
    config = [] if speculative is None else [f"--speculative-config={json.dumps(speculative)}"]
    return [f"--model={model}", *kept, *config]


def stock_drafter(manifest: Path, draft_tokens: int) -> dict[str, Any]:
    """vLLM's speculative config for the manifest's only drafter at one draft length."""
    config = speculative_config(_plan(manifest))
    if config is None:
        raise ServerError(f"the drafter of {manifest} cannot be loaded")
    kept = {name: value for name, value in config.items() if name != "num_speculative_tokens_per_batch_size"}
    return {**kept, "num_speculative_tokens": draft_tokens}


def _plan(manifest: Path) -> launch.LaunchPlan:
    service = load_local_service(manifest, MODEL_ROOT)
    run_dir = Path(tempfile.gettempdir(), "outrider-benchmark")
    return launch.plan_launch(service.boot, service.hot, launch.Paths(mounted=False, run_dir=str(run_dir)))


def _environment(manifest: Path) -> dict[str, str]:
    """Ours sets the same for its engine: KV cache, threads, OpenMP, so that every system has it."""
    plan = _plan(manifest)
    environment = engine_environment(plan.boot, plan.paths.run_dir, os.environ)
    for name in (RUN_DIR_VARIABLE, *cpu.ENVIRONMENT):  # these make it ours
        environment.pop(name, None)
    return {**environment, "VLLM_LOGGING_LEVEL": "WARNING"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _group(leader: int) -> list[Path]:
    """The /proc folders of the processes in the group that `leader` leads."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == leader and fields[0] != "Z":  # the dead wait for their parent to look
            found.append(folder)
    return found


def machine_cpu_s() -> float:
    """CPU time that the machine has spent on anything, what its host took away included."""
    user, nice, system, _idle, _io, *interrupts_and_steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(interrupts_and_steal)) / CLOCK_TICKS


def _cpu_s(process: Path) -> float:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def _pss_kb(process: Path) -> int:
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
