"""What a pod says of a model that is not where its source says, and how vLLM loads one from a bucket."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from outrider_crds.model_sources import ModelRef, ModelSource, OciSource, S3Source
from outrider_runtime.bucket import bucket_folder
from outrider_runtime.drafters.pool import HostedPool
from outrider_runtime.identity import weights_commit
from outrider_runtime.server.serve import _check_target
from outrider_runtime.server.server_errors import StartupError
from outrider_runtime.vllm_plugin import arguments

from tests.engine.engines import boot_config, draft_model, lookup
from tests.unit.vllm_plugin.test_what_the_engine_is_started_with import plan_of

IN_BUCKET = ModelSource(s3=S3Source(uri="s3://models/llama"))


def test_image_without_a_model_is_named_with_its_folder(tmp_path: Path) -> None:
    """It is the pod's last line, which PodCrashing shows."""
    source = ModelSource(oci=OciSource(reference="registry/models/llama:1", path="weights"))
    with pytest.raises(StartupError) as refusal:
        _check_target(ModelRef(name="llama", source=source), str(tmp_path))
    assert "the image registry/models/llama:1 holds no model in weights" in str(refusal.value)


def test_image_without_streamer_is_named_before_engine_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own sentence is about a placeholder module."""
    monkeypatch.setitem(sys.modules, "runai_model_streamer", None)
    with pytest.raises(StartupError) as refusal:
        _check_target(ModelRef(name="llama", source=IN_BUCKET), "s3://models/without-streamer")
    assert "runai-model-streamer[s3] is not installed in this image" in str(refusal.value)


def test_bucket_that_cannot_be_read_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter whose bucket is closed is left out: that takes OSError, and the clients raise their own errors."""

    class Streamer:
        @staticmethod
        def pull_files(*_: object) -> None:
            raise RuntimeError("AccessDenied")

    monkeypatch.setitem(sys.modules, "runai_model_streamer", Streamer)
    with pytest.raises(OSError, match="cannot be had from its bucket: AccessDenied"):
        bucket_folder("s3://models/closed")


def test_identity_of_weights_in_a_bucket_is_unknown() -> None:
    """The hub's client raises an error for such a name."""
    assert weights_commit("s3://models/llama") == ""


def test_one_model_in_a_bucket_has_vllm_stream_all() -> None:
    """vLLM has one loader for target and drafts."""
    draft = draft_model(Path("/drafts/small"))
    assert draft.draft_model is not None
    model = draft.draft_model.model.model_copy(update={"source": IN_BUCKET})
    draft = draft.model_copy(update={"draft_model": draft.draft_model.model_copy(update={"model": model})})
    boot = boot_config([lookup(), draft])
    with_draft = arguments.engine_arguments(plan_of(boot, HostedPool(hosted=(lookup(), draft))))
    assert "--load-format=runai_streamer" in with_draft
    without = arguments.engine_arguments(plan_of(boot, HostedPool(hosted=(lookup(),))))
    assert not [word for word in without if word.startswith("--load-format")]
