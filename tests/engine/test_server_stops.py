"""How a server ends: drained by a signal, or with its engine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.conftest import Laptop
from tests.engine.planted_models import Counting
from tests.engine.server_process import PATIENCE_S, Server, boot_document, write_json

pytestmark = pytest.mark.model

GRACE = "8s"
"""Time in which a busy machine answers one more request."""
RUNNING_TOKENS = 600
"""Output tokens of a request that takes seconds."""
HOT = {
    "schemaVersion": 1,
    "mode": "ClosedLoop",
    "draftPrefill": "Auto",
    "maxDraftTokens": 3,
    "sloClasses": [{"name": "chat", "tpot": "1s"}],
    "defaultSLOClass": "chat",
}


@pytest.fixture(scope="module")
def bare_pod(models: Counting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A pod's server on mounted configs whose engine runs vLLM's own scheduler: the plugin is not active."""
    folder = tmp_path_factory.mktemp("bare")
    stock = ["--scheduler-cls=tests.engine.stock_scheduler.stock_scheduler", "--no-async-scheduling"]
    stock.append("--root-path=/llm")
    boot = write_json(folder / "boot.json", boot_document(models.target, extra_arguments=stock))
    hot = write_json(folder / "hot.json", HOT)
    arguments = ("--config", str(boot), "--hot-config", str(hot), "--profiles", str(folder), "--podinfo", str(folder))
    server = Server(folder / "server.log", str(models.target), *arguments, "--drain-grace", GRACE)
    try:
        server.wait_until("the API", server.is_listening)
        yield server
    finally:
        server.stop()


def test_pod_without_an_active_plugin_never_becomes_ready(bare_pod: Server) -> None:
    """Readiness asserts that the plugin is active; the pod is alive, and the state says why."""
    assert bare_pod.chat().status_code == 200
    answer = bare_pod.admin.get("/readyz")
    assert answer.status_code == 503
    assert "plugin inside the engine has not reported" in answer.text
    assert bare_pod.probe("/livez") == 200
    state = bare_pod.state()
    assert not state.ready
    assert not state.plugin_active
    assert state.service == "alone"
    assert bare_pod.metric("outrider_plugin_active") == 0


def test_root_path_serves_the_api_below_it(bare_pod: Server) -> None:
    """`--root-path=/llm` was accepted, and the gate answered 404 to every path under it."""
    body = {"model": bare_pod.model, "prompt": "Once", "max_tokens": 1}
    assert bare_pod.api.post("/llm/v1/completions", json=body).status_code == 200
    assert bare_pod.api.get("/llm/v1/models").status_code == 200
    assert bare_pod.api.get("/llm/metrics").status_code == 404


def test_a_signal_lets_running_requests_finish(bare_pod: Server) -> None:
    """Graceful termination: unready first, new requests still served for a while, running ones to their end."""
    body = {"model": bare_pod.model, "prompt": "Once", "max_tokens": RUNNING_TOKENS, "ignore_eos": True}
    finished: list[httpx.Response] = []
    with httpx.Client(base_url=str(bare_pod.api.base_url), timeout=PATIENCE_S) as other:
        request = threading.Thread(target=lambda: finished.append(other.post("/v1/completions", json=body)))
        request.start()
        bare_pod.wait_until("the request", lambda: bare_pod.metric("vllm:num_requests_running") == 1)
        bare_pod.process.send_signal(signal.SIGTERM)
        bare_pod.wait_until("the drain", lambda: "draining" in bare_pod.admin.get("/readyz").text)
        assert bare_pod.probe("/livez") == 200
        late = bare_pod.chat()
        assert late.status_code == 200
        assert late.headers["connection"] == "close"
        request.join(PATIENCE_S)
    assert finished[0].status_code == 200
    assert finished[0].json()["usage"]["completion_tokens"] == RUNNING_TOKENS
    assert bare_pod.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert "draining: " in bare_pod.log.read_text(errors="replace")


def test_a_signal_ends_a_server_whose_engine_is_starting(models: Counting, tmp_path: Path) -> None:
    """Bug: vLLM swallowed the interrupt where it waits for its engine, and a rollout waited out the grace period."""
    boot = write_json(tmp_path / "boot.json", boot_document(models.target, extra_arguments=[]))
    hot = write_json(tmp_path / "hot.json", HOT)
    server = Server(tmp_path / "server.log", str(models.target), "--config", str(boot), "--hot-config", str(hot))
    try:
        server.wait_until("the engine's process", lambda: bool(_engine_cores(server)))
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert "stopped while the engine was starting" in server.log.read_text(errors="replace")
        psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not [child for child in family if child.is_running()]
    finally:
        server.stop()


def test_server_that_cannot_start_ends_with_the_cause(models: Counting, tmp_path: Path) -> None:
    """The kubelet keeps it as the termination message; bug: it was Python's resource tracker, after "See root cause
    above"."""
    boot = write_json(tmp_path / "boot.json", boot_document(models.target, extra_arguments=["--block-size=16"]))
    hot = write_json(tmp_path / "hot.json", HOT)
    server = Server(tmp_path / "server.log", str(models.target), "--config", str(boot), "--hot-config", str(hot))
    try:
        assert server.process.wait(PATIENCE_S) == 1
        assert "outrider-runtime: the engine did not start: " in server.last_lines(1)
        assert "No common block size for 16" in server.last_lines(1)
    finally:
        server.stop()


def test_a_server_whose_engine_dies_ends_with_a_sentence(laptop: Laptop) -> None:
    """The kubelet starts a new one; nothing hangs, nothing stays behind. (Last: it ends the shared server.)"""
    server = laptop.server
    family = psutil.Process(server.process.pid).children(recursive=True)
    engine = _engine_cores(server)[0]
    assert list(laptop.run_volume.iterdir())
    os.kill(engine.pid, signal.SIGKILL)
    assert server.process.wait(PATIENCE_S) == 1
    assert "outrider-runtime: the engine has died" in server.last_lines(15)
    assert not list(laptop.run_volume.iterdir())
    psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not [child for child in family if child.is_running()]


def _engine_cores(server: Server) -> list[psutil.Process]:
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in family if "EngineCore" in _command_line(child)]


def _command_line(process: psutil.Process) -> str:
    """Empty where it has ended since it was listed: a starting engine calls short-lived commands."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
