"""The service that vLLM's flags describe, and the sentence for flags and files that make none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider_runtime.stock_server import service_of_flags as flags
from outrider_runtime.stock_server.activity import StepAsideError
from outrider_runtime.stock_server.service_of_flags import obstacle, service_of_flags


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_product", lambda: "cpu")


def vllm_flags(**chosen: Any) -> SimpleNamespace:
    """vLLM's EngineArgs with their defaults, as far as they are read."""
    graphs = SimpleNamespace(cudagraph_capture_sizes=None, max_cudagraph_capture_size=None)
    defaults: dict[str, Any] = {
        "model": "org/Llama-3.1-8B", "revision": None, "served_model_name": None, "tensor_parallel_size": 1,
        "max_model_len": None, "max_num_seqs": None, "speculative_config": None, "spec_method": None,
        "spec_model": None, "spec_tokens": None, "data_parallel_size": 1, "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1, "nnodes": 1, "_api_process_count": 1, "_api_process_rank": 0,
        "scheduler_cls": None, "worker_cls": "auto", "distributed_executor_backend": None, "kv_transfer_config": None,
        "cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None, "compilation_config": graphs,
        "hf_overrides": None,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **chosen})


def pool(speculative: dict[str, Any] | None, **chosen: Any) -> list[dict[str, Any]]:
    service = service_of_flags(vllm_flags(speculative_config=speculative, **chosen), None)
    return [drafter.wire() for drafter in service.boot.draft_pool]


def test_pool_without_a_drafter_is_the_lookup() -> None:
    service = service_of_flags(vllm_flags(max_num_seqs=8, served_model_name=["My Model"]), None)
    assert [drafter.method for drafter in service.boot.draft_pool] == ["PromptLookup"]
    assert service.boot.max_draft_tokens == 5
    assert service.boot.engine.extra_args == ["--max-num-seqs=8"]
    assert service.boot.service == "my-model"


@pytest.mark.parametrize(
    ("model", "service"),
    [
        ("org/3b-model", "model-3b-model"),
        ("/hub/snapshots/" + "0e91" * 10, "model-" + "0e91" * 8 + "0e"),
        ("org/__", "model"),
    ],
)
def test_any_model_name_makes_a_service_name(model: str, service: str) -> None:
    """Bug: a model whose name starts with a digit kept Outrider from being active."""
    assert service_of_flags(vllm_flags(model=model), None).boot.service == service


@pytest.mark.parametrize(
    ("speculative", "method", "field"),
    [
        ({"method": "eagle3", "model": "org/eagle3-head"}, "Eagle", "eagle"),
        ({"model": "org/EAGLE3-head"}, "Eagle", "eagle"),
        ({"model": "org/small"}, "DraftModel", "draftModel"),
        ({"method": "draft_model", "model": "org/small", "draft_tensor_parallel_size": 1}, "DraftModel", "draftModel"),
        ({"method": "dflash", "model": "org/block"}, "Block", "block"),
        ({"method": "dspark", "model": "org/block"}, "Block", "block"),
        ({"method": "deepseek_mtp"}, "MTP", "mtp"),
    ],
)
def test_pool_has_the_users_drafter_and_the_lookup(speculative: dict[str, Any], method: str, field: str) -> None:
    drafter, lookup = pool({**speculative, "num-speculative-tokens": 3})
    assert drafter["method"] == method
    if method != "MTP":
        assert drafter[field]["model"]["name"] == speculative["model"]
    assert lookup["method"] == "PromptLookup"


def test_users_draft_length_is_the_most() -> None:
    service = service_of_flags(vllm_flags(spec_method="mtp", spec_tokens=2), None)
    assert service.boot.max_draft_tokens == service.hot.max_draft_tokens == 2


def test_users_lookup_keeps_its_lengths() -> None:
    (lookup,) = pool({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 6})
    assert lookup["promptLookup"] == {"minTokens": 6, "maxTokens": 6}


def test_model_in_a_folder_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    source = service_of_flags(vllm_flags(model="model"), None).boot.target.source
    assert source.host_path is not None
    assert source.host_path.path == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("speculative", "sentence"),
    [
        ({"method": "suffix", "num_speculative_tokens": 4}, "method suffix, which Outrider does not host"),
        ({"method": "medusa", "model": "org/heads", "num_speculative_tokens": 4}, "method medusa"),
        ({"method": "eagle3", "model": "org/head", "quantization": "fp8"}, "has quantization"),
        ({"method": "eagle3", "model": "org/head", "num_speculative_tokens": 99}, "maxDraftTokens"),
        ({"method": "mtp"}, "no num_speculative_tokens"),
        ({"model": "org/small", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}, "over 1 devices"),
    ],
)
def test_drafter_that_is_not_hosted_is_named(speculative: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StepAsideError, match=sentence):
        pool(speculative)


@pytest.mark.parametrize(
    ("chosen", "environment", "sentence"),
    [
        ({"data_parallel_size": 2}, {}, "--data-parallel-size is 2"),
        ({"pipeline_parallel_size": 2}, {}, "--pipeline-parallel-size is 2"),
        ({"nnodes": 2}, {}, "--nnodes is 2"),
        ({"_api_process_count": 4}, {}, "several API servers"),
        ({"scheduler_cls": "other.Scheduler"}, {}, "the scheduler is other.Scheduler"),
        ({"worker_cls": "other.Worker"}, {}, "the worker is other.Worker"),
        ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "VLLM_USE_V2_MODEL_RUNNER is 0"),
        ({"distributed_executor_backend": "ray"}, {}, "backend is ray"),
        ({"kv_transfer_config": {"kv_connector": "X"}}, {}, "--kv-transfer-config"),
    ],
)
def test_flags_that_exclude_outrider_are_named(
    chosen: dict[str, Any], environment: dict[str, str], sentence: str
) -> None:
    assert sentence in obstacle(vllm_flags(**chosen), environment)


def test_default_flags_are_no_obstacle() -> None:
    assert not obstacle(vllm_flags(), {})
    assert not obstacle(vllm_flags(distributed_executor_backend="mp"), {"VLLM_USE_V2_MODEL_RUNNER": "1"})


FILE = """
draftPool:
- {name: words, method: PromptLookup, promptLookup: {minTokens: 3}}
sloClasses:
- {name: interactive, tpot: 50ms}
speculation: {maxDraftTokens: 7, mode: Static}
"""


def of_file(folder: Path, text: str, **chosen: Any) -> Any:
    file = folder / "outrider.yaml"
    file.write_text(text)
    return service_of_flags(vllm_flags(**chosen), file)


def test_file_is_pool_classes_and_speculation(tmp_path: Path) -> None:
    service = of_file(tmp_path, FILE)
    assert [drafter.name for drafter in service.boot.draft_pool] == ["words"]
    assert [slo.name for slo in service.hot.slo_classes] == ["interactive"]
    assert (service.hot.mode, service.hot.max_draft_tokens) == ("Static", 7)


def test_file_without_a_pool_leaves_the_users_drafter(tmp_path: Path) -> None:
    service = of_file(tmp_path, "sloClasses: [{name: a, tpot: 1s}]", spec_method="mtp", spec_tokens=3)
    assert [drafter.method for drafter in service.boot.draft_pool] == ["MTP", "PromptLookup"]
    assert service.boot.max_draft_tokens == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("draftPool: [", "cannot read .*line"),
        ("- a list", "must hold one document"),
        ("a: 1\n---\nb: 2", "must hold one document"),
        ("target: {name: x}", "has the fields target"),
        ("speculation: {maxDraftTokens: 99}", "spec.speculation.maxDraftTokens"),
        ("draftPool: [{name: a, method: Eagle}]", "spec.draftPool"),
        (
            "draftPool: [{name: a, method: DraftModel, draftModel: {model: {name: m, source: "
            "{pvc: {claimName: c, path: p}}}}}]",
            "no claims without Kubernetes",
        ),
    ],
)
def test_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(StepAsideError, match=sentence):
        of_file(tmp_path, text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepAsideError, match=r"cannot read .*nowhere\.yaml"):
        service_of_flags(vllm_flags(), tmp_path / "nowhere.yaml")


def test_two_pools_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StepAsideError, match="has a draftPool, and --speculative-config a drafter"):
        of_file(tmp_path, FILE, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
