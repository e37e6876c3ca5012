"""`outrider-prefetch` against a hub of this machine: what is downloaded, what is left out, what it reports."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub.constants import ENDPOINT
from outrider_crds.prefetch_report import PREFETCH_PATH, PREFETCH_REFUSED
from outrider_runtime.hub_download import DownloadError, HubModel, attempt, is_final, is_on_claim, wanted_files
from outrider_runtime.prefetch import summary

from tests.ports import free_port

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATIENCE_S = 300
"""Timeout of all waits: a busy machine is slow, not wrong."""
TARGET = HubModel("org/model", None, is_target=True)
DRAFT = HubModel("org/draft", None, is_target=False)
OTHER_DRAFT = HubModel("org/other", "main", is_target=False)
HUB = str(urlsplit(ENDPOINT).hostname)
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "pytorch_model.bin": b"b" * 9000}


class ModelHub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that its client needs for a model called org/model."""

    gate: threading.Event
    """Weights are sent once it is set."""
    refusals: list[int]
    """Codes of the next answers."""
    files: Mapping[str, bytes] = FILES

    def do_GET(self) -> None:
        if self.refusals:
            self._answer(b"", code=self.refusals.pop(0))
            return
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

    def _answer(self, body: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def refusals() -> list[int]:
    """Codes with which the hub answers the next requests."""
    return []


@pytest.fixture
def hub(refusals: list[int]) -> Iterator[tuple[str, threading.Event]]:
    gate = threading.Event()
    handler = type("Hub", (ModelHub,), {"gate": gate, "refusals": refusals})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
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
            "schemaVersion": 1, "model": "org/model", "downloadedBytes": 2, "totalBytes": 5002, "trouble": "",
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
    assert process.returncode == PREFETCH_REFUSED
    assert said.splitlines()[-1].startswith("outrider-prefetch: model 'org/absent' cannot be had from the hub: ")


def test_hub_that_answers_503_is_tried_again(
    tmp_path: Path, hub: tuple[str, threading.Event], refusals: list[int]
) -> None:
    """It was final after 70 seconds."""
    refusals += [503, 503]
    hub[1].set()
    port = free_port()
    with running(hub[0], tmp_path, port, "--target", "org/model@") as process:
        while process.poll() is None and "503" not in str(_reported(port).get("trouble")):
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "it is tried again in 5 s" in said


@pytest.mark.parametrize("files", [FILES, {"config.json": b"{}", "model.bin": b"w" * 99}])
def test_whole_claim_needs_no_hub(tmp_path: Path, hub: tuple[str, threading.Event], files: Mapping[str, bytes]) -> None:
    """A claim that had every file failed while the hub was away."""
    hub[1].set()
    ModelHub.files = files
    try:
        for url in (hub[0], "http://127.0.0.1:9"):
            with running(url, tmp_path, free_port(), "--target", "org/model@main") as process:
                _, said = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, said
    finally:
        ModelHub.files = FILES
    assert said.splitlines()[-1] == "on the claim: the target"


def test_claim_that_lacks_a_file_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "a.safetensors").write_bytes(b"w")
    shards = {"first": "a.safetensors", "second": "b.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert not is_on_claim(HubModel("org/model", COMMIT, is_target=True))


def _hang(_: int) -> None:
    time.sleep(PATIENCE_S)


def _crash(code: int) -> None:
    os._exit(code)


def _refuse(message: str) -> None:
    raise ValueError(message)


@pytest.mark.parametrize(
    ("work", "argument", "words", "final"),
    [
        (_hang, 0, "no byte came for 1 s", False),
        (_crash, 3, "the download ended with exit code 3", False),
        (_refuse, "no such name", "no such name", True),
    ],
)
def test_attempt_that_fails_says_how(work: Callable[[Any], None], argument: Any, words: str, final: bool) -> None:
    """A download that hung was "Downloading 3.0 GB of 16.0 GB" for ever."""
    with pytest.raises(DownloadError, match=words) as raised:
        attempt(work, argument, lambda: 0, stall_s=1.0 if work is _hang else PATIENCE_S)
    assert raised.value.is_final is final


def _answered(code: int, *hosts: str) -> Exception:
    """Return the error of a request that went from host to host."""
    error = Exception("refused")
    hops = [SimpleNamespace(status_code=302, url=f"https://{host}/org/model", history=[]) for host in hosts]
    error.response = hops[-1]  # type: ignore[attr-defined]
    hops[-1].status_code, hops[-1].history = code, hops[:-1]
    return error


@pytest.mark.parametrize(
    ("error", "final"),
    [(_answered(code, HUB), code in (401, 403, 404)) for code in (401, 403, 404, 408, 429, 500, 503)]
    + [(_answered(403, "cdn.example", "other.example"), False), (_answered(404, HUB, "mirror.example"), True)]
    + [(ConnectionError("reset"), False), (TimeoutError(), False), (OSError(errno.ENOSPC, "full"), True)]
    + [(json.JSONDecodeError("Expecting value", "<html>", 0), False)],
)
def test_error_is_final_if_no_later_attempt_mends_it(error: Exception, final: bool) -> None:
    """Bug: the storage's 403 for a signed URL that had expired during a slow download ended it for good."""
    outer = RuntimeError("cannot be had")
    outer.__cause__ = error
    assert is_final(outer) is is_final(error) is final


def test_error_raised_while_a_refusal_is_handled_is_not_final() -> None:
    """Bug: a connection reset behind a 403 ended the download for good."""
    error = ConnectionError("reset")
    error.__context__ = _answered(403, HUB)
    assert not is_final(error)


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
