"""`outrider-prefetch` against a hub of this machine: what is downloaded, what is left out, what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from outrider_crds.prefetch_report import PREFETCH_PATH
from outrider_runtime.prefetch import HubModel, summary, wanted_files

from tests.ports import free_port

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATIENCE_S = 300
"""Timeout of all waits: a busy machine is slow, not wrong."""
TARGET = HubModel("org/model", None, is_target=True)
DRAFT = HubModel("org/draft", None, is_target=False)
OTHER_DRAFT = HubModel("org/other", "main", is_target=False)
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "pytorch_model.bin": b"b" * 9000}


class ModelHub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that its client needs for a model called org/model."""

    gate: threading.Event
    """Weights are sent once it is set."""
    files: Mapping[str, bytes] = FILES

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:5] == ["api", "models", "org", "model", "tree"]:
            tree = [{"type": "file", "path": name, "size": len(self.files[name]), "oid": name} for name in self.files]
            self._answer(json.dumps(tree).encode())
        elif parts[:4] == ["api", "models", "org", "model"]:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
            self._answer(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif parts[:3] == ["org", "model", "resolve"] and parts[4] in self.files:
            if self.command == "GET" and parts[4] == "model.safetensors":
                self.gate.wait(PATIENCE_S)
            self._answer(self.files[parts[4]], {"X-Repo-Commit": COMMIT, "ETag": f'"{parts[4]}"'})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[tuple[str, threading.Event]]:
    gate = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (ModelHub,), {"gate": gate}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", gate
    gate.set()
    server.shutdown()
    server.server_close()


@contextmanager
def running(url: str, cache: Path, port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DOWNLOAD_TIMEOUT": str(PATIENCE_S), "HF_HUB_ETAG_TIMEOUT": str(PATIENCE_S)}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", "from outrider_runtime.prefetch import main; main()"]
    command += [*arguments, "--admin-port", str(port)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_target_is_downloaded_and_progress_is_reported(tmp_path: Path, hub: tuple[str, threading.Event]) -> None:
    """Safetensors alone: a model that has both took twice the room."""
    url, gate = hub
    port = free_port()
    with running(url, tmp_path, port, "--target", "org/model@", "--draft", "org/absent@") as process:
        reported = _reported(port)
        while process.poll() is None and reported.get("downloadedBytes") != 2:
            time.sleep(0.05)  # until the config is there
            reported = _reported(port)
        assert process.poll() is None, process.communicate()
        assert reported == {
            "schemaVersion": 1, "model": "org/model", "downloadedBytes": 2, "totalBytes": 5002,
        }  # fmt: skip
        gate.set()
        _, said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
    assert "draft 'org/absent' is left out" in said
    assert said.splitlines()[-1] == "on the claim: the target and 0 of 1 drafts"
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert {file.name for file in snapshot.iterdir()} == {"config.json", "model.safetensors"}


def test_target_that_is_not_on_the_hub_ends_it_with_a_sentence(
    tmp_path: Path, hub: tuple[str, threading.Event]
) -> None:
    """Its last line is what Progressing shows."""
    with running(hub[0], tmp_path, free_port(), "--target", "org/absent@main") as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith("outrider-prefetch: model 'org/absent' cannot be had from the hub: ")


@pytest.mark.parametrize(
    ("models", "on_claim", "words"),
    [
        ([TARGET, DRAFT, OTHER_DRAFT], [TARGET, DRAFT], "on the claim: the target and 1 of 2 drafts"),
        ([TARGET], [TARGET], "on the claim: the target"),
        ([DRAFT, OTHER_DRAFT], [OTHER_DRAFT, DRAFT], "on the claim: 2 of 2 drafts"),
    ],
)
def test_last_line_counts_what_is_on_the_claim(models: list[HubModel], on_claim: list[HubModel], words: str) -> None:
    """It said that all models were, after drafts had been left out."""
    assert summary(models, on_claim) == words


def test_pickled_weights_are_taken_where_there_are_no_others() -> None:
    assert wanted_files(["config.json", "pytorch_model.bin"]) == ("config.json", "pytorch_model.bin")
    assert wanted_files(["a.safetensors", "original/a.pth", "a.gguf"]) == ("a.safetensors",)


def _reported(port: int) -> dict[str, object]:
    """{} before the page is served."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{PREFETCH_PATH}", timeout=5) as answer:
            document: dict[str, object] = json.loads(answer.read())
            return document
    except OSError:
        return {}
