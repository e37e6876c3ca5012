"""Target and draft in an S3 bucket whose certificate a private authority signed: streamed, and served."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.bucket_server import Bucket, bucket
from tests.engine.engines import POOR_DRAFT, SMALL, SMALL_CACHE
from tests.engine.server_process import PATIENCE_S, REPETITIVE, Server

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("runai_model_streamer_s3") is None,
        reason="runai-model-streamer[s3] is not installed; its boto3 wants an older python-dateutil than the tests'",
    ),
]


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Bucket]:
    with bucket({"small/target": SMALL, "small/draft": POOR_DRAFT}, tmp_path) as made:
        yield made


def _server(folder: Path, models: Bucket, target: str, *drafters: dict[str, Any]) -> Server:
    manifest = folder / "service.yaml"
    spec = {
        "target": {"name": "small", "source": {"s3": {"uri": f"s3://{models.name}/{target}"}}},
        "draftPool": list(drafters),
        "accelerator": {"products": ["cpu"]},
        "engine": {"maxModelLen": 512, "extraArgs": ["--max-num-seqs=4", "--enforce-eager", SMALL_CACHE]},
    }
    document = {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeService", "metadata": {"name": "small"}}
    manifest.write_text(yaml.safe_dump({**document, "spec": spec}))
    environment = {
        "AWS_ENDPOINT_URL": models.url,
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CA_BUNDLE": str(models.authority),
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    return Server(folder / "server.log", "small", "-f", str(manifest), environment=environment)


def _draft(models: Bucket) -> dict[str, Any]:
    model = {"name": "draft", "source": {"s3": {"uri": f"s3://{models.name}/small/draft"}}}
    return {"name": "draft", "method": "DraftModel", "draftModel": {"model": model}}


def test_target_and_draft_are_streamed_from_the_bucket(tmp_path: Path, models: Bucket) -> None:
    """Config, tokenizer and weights of both come from there, by a certificate that this machine does not trust."""
    server = _server(tmp_path, models, "small/target", _draft(models))
    try:
        server.wait_until("readiness", server.is_ready)
        (draft,) = server.state().drafters
        assert draft.loaded, draft.reason
        assert server.chat(REPETITIVE, max_tokens=16, temperature=0).status_code == 200
    finally:
        server.stop()
    assert {"small/target/model.safetensors", "small/draft/model.safetensors"} <= set(models.reads)


def test_bucket_without_the_model_ends_the_pod_with_the_cause(tmp_path: Path, models: Bucket) -> None:
    """Its last line is what a condition shows."""
    server = _server(tmp_path, models, "small/another")
    try:
        assert server.process.wait(PATIENCE_S) == 1
    finally:
        server.stop()
    assert "s3://models/small/another' is not in its bucket: there is no config.json" in server.last_lines(1)
