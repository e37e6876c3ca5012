"""What is wrong with an adapter's files, in sentences for the status, and the copy that the engine reads."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider_crds.model_sources import AdapterFolder, AdapterSource, AdapterVolume, HostPathSource, Lora
from outrider_runtime.server.adapter_files import AdapterFiles, UnusableAdapterError

from tests.engine.bucket_server import bucket
from tests.unit.server.test_prefetch_program import ModelHub

GOOD = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
WEIGHTS = "adapter_model.safetensors"
SOURCE = AdapterSource(folder=AdapterFolder(path="team/support"))


@pytest.fixture
def files(tmp_path: Path) -> AdapterFiles:
    volume = AdapterVolume(host_path=HostPathSource(path=str(tmp_path)))
    copies = tmp_path / "copies"
    copies.mkdir()
    return AdapterFiles(Lora(max_rank=16, volume=volume), mounted=False, copies=copies)


def write(tmp_path: Path, config: Any, *weights: str) -> Path:
    folder = tmp_path / "team" / "support"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in weights:
        (folder / name).write_bytes(b"weights")
    return folder


def copy(files: AdapterFiles, source: AdapterSource = SOURCE) -> Path:
    folder = files.new_folder()
    files.fill(folder, source)
    return folder


def test_each_copy_lies_in_a_folder_of_its_own(files: AdapterFiles, tmp_path: Path) -> None:
    """vLLM's prefix cache knows an adapter by its path: two loads of one folder may be of different weights."""
    folder = write(tmp_path, GOOD, "adapter_model.safetensors")
    first, second = copy(files), copy(files)
    assert first != second
    (folder / "adapter_model.safetensors").unlink()
    assert (first / "adapter_model.safetensors").read_bytes() == b"weights"
    assert {file.name for file in second.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_bytes_in_the_cache_of_the_hub_client_count(
    files: AdapterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download is copied into the folder at its end, so that the folder alone would look like a stall."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder, blobs = files.new_folder(), tmp_path / "models--org--one" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "1.incomplete").write_bytes(b"weights")
    (folder / "adapter_config.json").write_bytes(b"{}")
    assert files.bytes_on_disk(folder, AdapterSource.model_validate({"hub": {"repository": "org/one"}})) == 9
    assert files.bytes_on_disk(folder, SOURCE) == 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "adapter_config.json in team/support cannot be read"),
        ("[" * 100_000, "adapter_config.json in team/support cannot be read"),
        ([], "adapter_config.json in team/support is no JSON object"),
        ({**GOOD, "peft_type": "PROMPT_TUNING"}, "of type PROMPT_TUNING, and the engine hosts LORA alone"),
        ({**GOOD, "r": 64}, "team/support has rank 64, and engine.lora.maxRank is 16"),
        ({**GOOD, "rank_pattern": {"q_proj": 32}}, "team/support has rank 32"),
        ({**GOOD, "r": "8"}, "has no rank"),
        ({**GOOD, "r": True}, "has no rank"),
        ({}, "has no rank"),
        (GOOD, "there is no adapter_model.safetensors in team/support"),
    ],
)
def test_unusable_files_are_named_in_a_sentence(files: AdapterFiles, tmp_path: Path, config: Any, said: str) -> None:
    weights = [] if config == GOOD else ["adapter_model.safetensors"]
    write(tmp_path, config, *weights)
    with pytest.raises(UnusableAdapterError, match=said):
        copy(files)


def test_a_folder_that_is_missing_is_named_as_in_the_manifest(files: AdapterFiles) -> None:
    with pytest.raises(UnusableAdapterError, match=r"^there is no adapter_config.json in team/support$"):
        copy(files)


ASK = """
import json, sys
from pathlib import Path
from outrider_crds.model_sources import AdapterSource, Lora
from outrider_runtime.server.adapter_files import AdapterFiles, UnusableAdapterError

files = AdapterFiles(Lora(), mounted=True, copies=Path(sys.argv[1]))
for text in sys.argv[2:]:
    try:
        source = AdapterSource.model_validate_json(text)
        folder = files.new_folder()
        files.fill(folder, source)
        print(sorted(file.name for file in folder.iterdir()))
    except UnusableAdapterError as error:
        print(error, "(refused)" if error.is_refused else "")
"""


def test_an_adapter_is_downloaded_from_the_hub(tmp_path: Path) -> None:
    """The two files that an engine reads, and no others; a repository that is not there is a sentence."""
    contents = {"adapter_config.json": json.dumps(GOOD).encode(), "adapter_model.safetensors": b"weights"}
    handler = type("Hub", (ModelHub,), {"files": {**contents, "optimizer.pt": b"x" * 9000}, "refusals": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    copies, cache = tmp_path / "copies", tmp_path / "cache"
    copies.mkdir()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HUB_OFFLINE": "0"}
    environment = {**os.environ, **hub, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    try:
        sources = [{"hub": {"repository": name}} for name in ("org/model", "org/absent")]
        copied, absent = _answers(copies, environment, *sources)
    finally:
        server.shutdown()
        server.server_close()
    assert copied == "['adapter_config.json', 'adapter_model.safetensors']"
    assert absent.startswith("org/absent cannot be had from the hub: ")
    assert absent.endswith("(refused)"), "it is not tried again soon"
    assert not list(cache.rglob("optimizer.pt"))


@pytest.mark.skipif(
    importlib.util.find_spec("runai_model_streamer_s3") is None,
    reason="runai-model-streamer[s3] is not installed; its boto3 wants an older python-dateutil than the tests'",
)
def test_an_adapter_is_downloaded_from_a_bucket(tmp_path: Path) -> None:
    """The two files that an engine reads, and no others. A folder that is absent is a sentence, and leaves nothing.

    Checkpoints below the folder were downloaded, too; an adapter with the bucket to itself was not found; and the
    weights of an adapter with too high a rank were downloaded before its config was read.
    """
    good, large, copies = tmp_path / "good", tmp_path / "large", tmp_path / "copies"
    copies.mkdir()
    for folder, config in ((good, GOOD), (large, {**GOOD, "r": 64})):
        folder.mkdir()
        for name, text in (("adapter_config.json", json.dumps(config)), (WEIGHTS, "w"), ("x.pt", "x")):
            (folder / name).write_text(text)
    folders = {"": good, "team/[v2]": good, "team/[v2]/checkpoint-5": good, "team/large": large}
    with bucket(folders, tmp_path, "adapters") as served:
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": served.url,
            "AWS_ACCESS_KEY_ID": "reader",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CA_BUNDLE": str(served.authority),
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }
        uris = [f"s3://adapters{path}" for path in ("/team/[v2]/", "", "/team/large", "/team/absent")]
        below, whole, too_large, absent = _answers(copies, environment, *({"s3": {"uri": uri}} for uri in uris))
    assert below == whole == "['adapter_config.json', 'adapter_model.safetensors']"
    assert too_large.startswith("s3://adapters/team/large has rank 64")
    assert absent == "there is no adapter_config.json in s3://adapters/team/absent"
    read = ["team/[v2]/adapter_config.json", f"team/[v2]/{WEIGHTS}", "adapter_config.json", WEIGHTS]
    assert [*dict.fromkeys(served.reads)] == [*read, "team/large/adapter_config.json"]
    assert len(list(copies.iterdir())) == 2


@pytest.mark.parametrize(("code", "is_refused"), [(401, True), (403, True), (404, True), (429, False), (503, False)])
def test_refusal_of_a_bucket_is_known_by_its_code(
    code: int, is_refused: bool, files: AdapterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: only the hub's refusals were known, so each pod came back to a bucket every five minutes for a 403."""
    error = Exception(f"An error occurred ({code}) when calling ListObjectsV2")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": code}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "runai_model_streamer", SimpleNamespace(pull_files=_raise(error)))
    with pytest.raises(UnusableAdapterError, match=str(code)) as raised:
        copy(files, AdapterSource.model_validate({"s3": {"uri": "s3://adapters/one"}}))
    assert raised.value.is_refused is is_refused


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), ValueError("no JSON")])
def test_trouble_of_the_pod_is_no_refusal_of_the_hub(
    error: Exception, files: AdapterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an adapter waited for an hour after its pod's cache was full for a moment."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", _raise(error))
    with pytest.raises(UnusableAdapterError) as raised:
        copy(files, AdapterSource.model_validate({"hub": {"repository": "org/model"}}))
    assert not raised.value.is_refused


def _raise(error: Exception) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


def _answers(copies: Path, environment: dict[str, str], *sources: Any) -> list[str]:
    """What a process of that environment copies, or says, of each source."""
    command = [sys.executable, "-c", ASK, str(copies), *map(json.dumps, sources)]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
