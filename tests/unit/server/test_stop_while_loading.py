"""SIGTERM while the Torch backend loads a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.ports import free_port

PATIENCE_S = 120
SCRIPT = """
import sys, threading
from outrider_runtime.torch_engine import engine_loading
from outrider_runtime.server.main import main

def load(*_):
    print("begun", flush=True)
    threading.Event().wait()

engine_loading.load = load
sys.exit(main(sys.argv[1:]))
"""
"""`outrider-runtime` with a model that loads for ever: on a busy machine one took seven minutes."""


@pytest.mark.slow
def test_sigterm_ends_a_server_that_loads_a_model(tmp_path: Path) -> None:
    """Bug: the event loop's end waited for the thread that loads, so `serve -f` ended minutes after SIGTERM."""
    manifest = tmp_path / "service.yaml"
    manifest.write_text(yaml.safe_dump(_service(tmp_path)))
    ports = ["--port", str(free_port()), "--admin-port", str(free_port())]
    command = [sys.executable, "-c", SCRIPT, "serve", "-f", str(manifest), *ports]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert b"stopped while the engine was starting" in log
    assert b"Traceback" not in log


def _service(folder: Path) -> dict[str, object]:
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": "chat"},
        "spec": {
            "target": {"name": "org/target", "source": {"hostPath": {"path": str(folder)}}},
            "draftPool": [{"name": "lookup", "method": "PromptLookup", "promptLookup": {}}],
            "accelerator": {"products": ["cpu"]},
            "sloClasses": [{"name": "chat", "tpot": "50ms"}],
            "engine": {"backend": "Torch"},
        },
    }
