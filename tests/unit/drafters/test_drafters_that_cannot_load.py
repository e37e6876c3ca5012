"""A drafter that cannot load is dropped before the engine starts, with a sentence; the pod serves without it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.runtime_config import BootConfig, draft_mount
from outrider_runtime.drafters.checkpoint_files import LENGTH
from outrider_runtime.drafters.pool import HostedPool, ModelPlaces, choose_pool
from safetensors.numpy import save_file

from tests.engine.engines import block, boot_config, draft_model, eagle, lookup, medusa, model, mtp, sparse_self

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 100, "hidden_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def write(name: str, config: Any, tokens: dict[str, int] | None = None) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if tokens is not None:
            (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
        return path

    return write


def boot(target: Path, *drafters: DrafterSpec) -> BootConfig:
    return boot_config(drafters).model_copy(update={"target": model(target)})


def dropped(target: Path, drafter: DrafterSpec) -> str:
    """The reason for which `drafter` alone is dropped; empty when it is hosted."""
    pool = choose_pool(boot(target, drafter), ModelPlaces(mounted=False))
    assert bool(pool.hosted) != bool(pool.dropped)
    return pool.dropped.get(drafter.name, "")


def test_a_good_drafter_is_hosted(folder: Any) -> None:
    target = folder("target", LLAMA)
    assert dropped(target, eagle(folder("head", EAGLE3))) == ""
    assert dropped(target, draft_model(folder("small", LLAMA))) == ""


def test_window_beyond_the_longest_request_disables_drafter(folder: Any) -> None:
    """Admission does not know the longest request if engine.maxModelLen is not set."""
    target = folder("target", {**LLAMA, "max_position_embeddings": 2048})
    small = draft_model(folder("small", {**LLAMA, "max_position_embeddings": 2048}))
    assert small.draft_model is not None
    over = small.model_copy(update={"draft_model": small.draft_model.model_copy(update={"window_tokens": 2049})})
    for drafter, tokens in ((sparse_self(2040), 2056), (over, 2049)):
        assert f"its window is {tokens} tokens, and a request may take 2048" in dropped(target, drafter)
    assert dropped(target, sparse_self(2032)) == ""
    assert dropped(folder("unknown", LLAMA), sparse_self(1_000_000)) == ""


TARGETS = {
    "yuhuili-llama31-8b": {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32},
    "angelslim-qwen3-8b": {"vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36},
    "redhat-llama31-8b": {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32},
    "nvidia-gpt-oss-120b": {"vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36},
    "aqmedai-kimi-k2": {"vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61},
    "redhat-gemma4-31b": {"vocab_size": 262144, "hidden_size": 5376, "num_hidden_layers": 60},
}


@pytest.mark.parametrize("name", TARGETS)
def test_heads_are_hosted_as_their_publishers_name_them(folder: Any, name: str) -> None:
    """Bug: a head whose config names LlamaForCausalLM was refused, as in our own example for GPUs; and each is known
    for a head where it is given as a draft model."""
    config = json.loads(Path(__file__).with_name("heads").joinpath(f"{name}.json").read_text())
    target, head = folder("target", {**LLAMA, **TARGETS[name]}), folder("head", config)
    assert dropped(target, eagle(head)) == ""
    assert "use method Eagle" in dropped(target, draft_model(head))


@pytest.mark.parametrize(
    ("update", "field"),
    [
        ({"hidden_size": 2048}, "hidden_size"),
        ({"target_hidden_size": 2048}, "target_hidden_size"),
        ({"vocab_size": 32}, "vocabulary"),
        ({"draft_vocab_size": 200_000}, "draft_vocab_size"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 40]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [40]}}, "eagle_aux_hidden_state_layer_ids"),
    ],
    ids=str,
)
def test_a_head_for_another_target_is_refused_with_the_field(folder: Any, update: dict[str, Any], field: str) -> None:
    name = "yuhuili-llama31-8b"
    config = json.loads(Path(__file__).with_name("heads").joinpath(f"{name}.json").read_text())
    target, head = folder("target", {**LLAMA, **TARGETS[name]}), folder("head", {**config, **update})
    assert field in dropped(target, eagle(head))


@pytest.mark.parametrize(
    ("update", "field"),
    [
        ({"draft_vocab_size": "8192"}, "draft_vocab_size is '8192'"),
        ({"draft_vocab_size": [1]}, r"draft_vocab_size is \[1\]"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"eagle_config": 5}, "eagle_config is 5"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "eagle_aux_hidden_state_layer_ids is 5"),
        ({"eagle_aux_hidden_state_layer_ids": ["a"]}, "eagle_aux_hidden_state_layer_ids.0 is 'a'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, "eagle_config.*layer_ids.0 is 'a'"),
        ({"transformer_layer_config": "x"}, "transformer_layer_config is 'x'"),
        ({"transformer_layer_config": [1]}, r"transformer_layer_config is \[1\]"),
        ({"transformer_layer_config": {"hidden_size": "64"}}, "hidden_size is '64'"),
        ({"architectures": 5}, "architectures is 5"),
        ({"architectures": [5]}, "architectures.0 is 5"),
        ({"architectures": [None]}, "architectures.0 is None"),
    ],
    ids=str,
)
def test_config_field_of_wrong_type_is_named_and_pod_serves(folder: Any, update: dict[str, Any], field: str) -> None:
    """Bug: the pod stayed down with a traceback, however good the rest of its pool was."""
    name = "redhat-gemma4-31b" if "transformer_layer_config" in update else "yuhuili-llama31-8b"
    config = json.loads(Path(__file__).with_name("heads").joinpath(f"{name}.json").read_text())
    target, head = folder("target", {**LLAMA, **TARGETS[name]}), folder("head", {**config, **update})
    for drafter in (eagle(head), draft_model(head)):
        assert re.search(f"head/config.json: {field}", dropped(target, drafter))


def test_a_config_that_is_nested_too_deeply_is_named(folder: Any) -> None:
    target = folder("target", LLAMA, {"a": 0})
    assert "cannot be read" in dropped(target, eagle(folder("head", "[" * 100_000)))
    head = folder("deep", EAGLE3)
    (head / "tokenizer.json").write_text("[" * 100_000)
    assert dropped(target, eagle(head)) == ""


def test_a_path_that_does_not_exist_is_named(folder: Any, tmp_path: Path) -> None:
    reason = dropped(folder("target", LLAMA), eagle(tmp_path / "nowhere"))
    assert "nowhere" in reason
    assert "config.json" in reason


def test_a_config_that_is_no_json_is_named(folder: Any) -> None:
    assert "cannot be read" in dropped(folder("target", LLAMA), eagle(folder("head", "{not json")))


@pytest.mark.parametrize("config", ["[]", "null", "3"])
def test_a_config_that_is_no_object_is_named(folder: Any, config: str) -> None:
    assert "not a JSON object" in dropped(folder("target", LLAMA), eagle(folder("head", config)))


def test_another_vocabulary_size_is_named_with_both_sizes(folder: Any) -> None:
    reason = dropped(folder("target", LLAMA), draft_model(folder("small", {**LLAMA, "vocab_size": 99})))
    assert "99" in reason
    assert "100" in reason


def test_another_vocabulary_of_the_same_size_is_found(folder: Any) -> None:
    """Bug: sizes agree, tokens do not: every proposal would be rejected, without a visible reason."""
    target = folder("target", LLAMA, {"a": 0, "b": 1})
    assert "not the same" in dropped(target, draft_model(folder("small", LLAMA, {"a": 1, "b": 0})))
    assert dropped(target, draft_model(folder("same", LLAMA, {"a": 0, "b": 1}))) == ""


def test_draft_model_with_too_few_positions_is_named(folder: Any) -> None:
    """Past its last position a draft model reads behind its tables, which ends the engine on a GPU."""
    target = folder("target", {**LLAMA, "max_position_embeddings": 8192})
    reason = dropped(target, draft_model(folder("small", {**LLAMA, "max_position_embeddings": 2048})))
    assert "2048" in reason
    assert "8192" in reason
    assert "maxModelLen" in reason


@pytest.mark.parametrize(
    ("update", "evidence"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types: conv"),
        ({"text_config": {"layer_types": ["linear_attention"]}}, "layer_types: linear_attention"),
        ({"architectures": ["Mamba2ForCausalLM"], "state_size": 128}, "state_size"),
        ({"architectures": ["JambaForCausalLM"], "mamba_d_state": 16}, "mamba_d_state"),
        ({"layer_types": ["full_attention", "sliding_attention"], "state_size": None}, ""),
    ],
    ids=str,
)
def test_draft_model_that_keeps_a_state_is_refused(folder: Any, update: dict[str, Any], evidence: str) -> None:
    """Bug: it was hosted, and its state kept the tokens that the target had rejected; the page alone warned of it."""
    reason = dropped(folder("target", LLAMA), draft_model(folder("small", {**LLAMA, **update})))
    assert bool(reason) == bool(evidence)
    if evidence:
        assert f"keep a state ({evidence})" in reason
        assert "use a draft model whose layers all attend" in reason


def test_limits_of_an_overridden_config_are_left_to_the_engine(folder: Any) -> None:
    """`--hf-overrides={"max_position_embeddings": 1024}` makes a request longer or shorter than config.json says."""
    target = folder("target", {**LLAMA, "max_position_embeddings": 8192})
    made = boot(target, draft_model(folder("small", {**LLAMA, "max_position_embeddings": 2048})), sparse_self(9000))
    for spelling in (['--hf-overrides={"max_position_embeddings": 1024}'], ["--hf_overrides", "{}"]):
        engine = made.engine.model_copy(update={"extra_args": spelling})
        pool = choose_pool(made.model_copy(update={"engine": engine}), ModelPlaces(mounted=False))
        assert [drafter.name for drafter in pool.hosted] == ["draft", "self"]


def test_a_draft_model_given_as_eagle_head_is_named(folder: Any) -> None:
    assert "DraftModel" in dropped(folder("target", LLAMA), eagle(folder("small", LLAMA)))


def test_an_eagle_head_given_as_draft_model_is_named(folder: Any) -> None:
    assert "Eagle" in dropped(folder("target", LLAMA), draft_model(folder("head", EAGLE3)))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({**EAGLE3, "architectures": ["PeagleLlamaForCausalLM"]}, "P-EAGLE"),
        ({**EAGLE3, "architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}, "P-EAGLE"),
        ({**EAGLE3, "pard_token": 5}, "P-EAGLE"),
        ({**LLAMA, "draft_vocab_size": 50, "ptd_token_id": 5}, "P-EAGLE"),
        ({**EAGLE3, "parallel_drafting": True}, "P-EAGLE"),
        ({**LLAMA, "pard_token": 5}, "PARD"),
    ],
    ids=str,
)
def test_parallel_drafts_are_refused_by_name(folder: Any, config: dict[str, Any], name: str) -> None:
    """Bug: they were taken for EAGLE heads and draft models, and run token by token, for which they are not trained."""
    target, draft = folder("target", LLAMA), folder("draft", config)
    for drafter in (eagle(draft), draft_model(draft)):
        reason = dropped(target, drafter)
        assert f"is {name}" in reason or "not an EAGLE-3 head" in reason
    assert f"is {name}" in dropped(target, draft_model(draft))


EAGLE_1_WEIGHTS = ("fc.weight", "embed_tokens.weight", "layers.0.self_attn.q_proj.weight")
UNSERVED = {
    "EAGLE-1 by its name": ({**LLAMA, "architectures": ["EagleLlamaForCausalLM"]}, (), "an EAGLE-1 or HASS head"),
    "EAGLE-1 by its weights": (LLAMA, EAGLE_1_WEIGHTS, "an EAGLE-1 or HASS head"),
    "Medusa": ({**LLAMA, "architectures": ["MedusaModel"]}, (), "Medusa heads"),
    "MLPSpeculator": ({"model_type": "mlp_speculator", "architectures": ["MLPSpeculator"]}, (), "an MLPSpeculator"),
}


@pytest.mark.parametrize(("config", "tensors", "name"), UNSERVED.values(), ids=UNSERVED)
def test_kinds_of_drafts_without_a_method_are_named(folder: Any, config: Any, tensors: Any, name: str) -> None:
    """Bug: under Eagle the advice was method DraftModel, under which it failed with an error of the engine's own."""
    target, draft = folder("target", LLAMA), folder("draft", config)
    if tensors:
        save_file({tensor: np.zeros(1, np.float32) for tensor in tensors}, draft / "model.safetensors")
    for drafter in (eagle(draft), draft_model(draft)):
        assert f"the checkpoint is {name}" in dropped(target, drafter)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def without_a_shard(file: Path) -> None:
    index = {"weight_map": {"a": file.name, "b": "model-00002.safetensors"}}
    (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no byte": (lambda file: file.write_bytes(b""), "model.safetensors is damaged or cut off"),
    "half a length": (lambda file: file.write_bytes(b"1234"), "model.safetensors is damaged or cut off"),
    "huge header": (lambda file: file.write_bytes(b"\xff" * 16), "model.safetensors is damaged or cut off"),
    "no JSON": (lambda file: file.write_bytes(LENGTH.pack(4) + b"[[[["), "model.safetensors is damaged or cut off"),
    "a list": (lambda file: file.write_bytes(LENGTH.pack(2) + b"[]"), "model.safetensors is damaged or cut off"),
    "last byte": (cut_off, "model.safetensors is damaged or cut off"),
    "a shard": (without_a_shard, "model-00002.safetensors cannot be read: No such file"),
    "index": (
        lambda file: (file.parent / "model.safetensors.index.json").write_text("[]"),
        "model.safetensors.index.json cannot be read",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights_are_named_before_the_start(folder: Any, damage: Any, reason: str) -> None:
    """Bug: a file of no bytes was "unpack requires a buffer of 8 bytes", after a minute of the engine's start."""
    target, draft = folder("target", QWEN3), folder("draft", DFLASH)
    save_file({"a": np.zeros(8, np.float32)}, draft / "model.safetensors")
    assert dropped(target, block(draft)) == ""
    damage(draft / "model.safetensors")
    assert reason in dropped(target, block(draft))


def test_a_head_for_a_target_of_another_width_is_named(folder: Any) -> None:
    reason = dropped(folder("target", LLAMA), eagle(folder("head", {**EAGLE3, "hidden_size": 32})))
    assert "32" in reason
    assert "64" in reason


def test_all_drafters_that_load_are_hosted_in_the_pools_order(folder: Any, tmp_path: Path) -> None:
    """A broken entry takes the place of no other drafter."""
    broken = draft_model(tmp_path / "nowhere", "broken")
    good = eagle(folder("head", EAGLE3), "good")
    other = eagle(folder("other-head", {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [1, 3]}), "other")
    small = draft_model(folder("small", LLAMA), "small")
    pool = choose_pool(boot(folder("target", LLAMA), lookup(), broken, small, good, other), ModelPlaces(mounted=False))
    assert pool.hosted == (lookup(), small, good, other)
    assert set(pool.dropped) == {"broken"}
    assert pool.primary == good


def test_drafter_that_the_engine_lacks_is_dropped_with_a_remedy(folder: Any, tmp_path: Path) -> None:
    """A boot config may come from an operator of another release: the pod serves on with the rest of the pool."""
    pool = choose_pool(boot(folder("target", LLAMA), medusa(tmp_path), lookup()), ModelPlaces(mounted=False))
    assert pool.hosted == (lookup(),)
    assert pool.dropped["medusa"].startswith("Unsupported")
    assert "engine.backend Torch" in pool.dropped["medusa"]


def test_vllm_config_names_the_head_if_there_is_one() -> None:
    """Promise: the target hands out the hidden states that the head reads, wherever it stands in the pool."""
    drafters = (lookup(), draft_model(Path("/small")), eagle(Path("/head")))
    assert HostedPool(hosted=drafters).primary == drafters[2]
    assert HostedPool(hosted=drafters[:2]).primary == drafters[1]
    assert HostedPool(hosted=drafters[:1]).primary == drafters[0]
    assert HostedPool().primary is None


def test_in_a_pod_models_are_looked_for_where_they_are_mounted(folder: Any) -> None:
    head = eagle(folder("head", EAGLE3))
    assert head.neural is not None
    assert ModelPlaces().location(head.neural.model, draft_mount("eagle")) == "/var/lib/outrider/models/draft-eagle"


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 8}
DFLASH = {
    "architectures": ["DFlashDraftModel"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    "block_size": 8, "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 7]}, "num_target_layers": 8,
}  # fmt: skip
SAVED_BY_SPECULATORS = {
    "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 8, "mask_token_id": 4,
    "draft_vocab_size": 50, "aux_hidden_state_layer_ids": [2, 8],
    "transformer_layer_config": {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2},
}  # fmt: skip
DSPARK = {
    "architectures": ["Qwen3DSparkModel"], "vocab_size": 100, "hidden_size": 64, "block_size": 7,
    "mask_token_id": 4, "target_layer_ids": [1, 7], "markov_head_type": "vanilla",
}  # fmt: skip
PUBLISHED = {"dflash": DFLASH, "speculators": SAVED_BY_SPECULATORS, "dspark": DSPARK}


@pytest.mark.parametrize("name", PUBLISHED)
def test_block_drafts_are_hosted_in_their_published_formats(folder: Any, name: str) -> None:
    target, draft = folder("target", QWEN3), folder("draft", PUBLISHED[name])
    assert dropped(target, block(draft, max_tokens=7)) == ""
    assert "block.maxTokens is 8" in dropped(target, block(draft, max_tokens=8))
    for other_method in (eagle(draft), draft_model(draft)):
        assert "use method Block" in dropped(target, other_method)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({"hidden_size": 32}, "width 32 (hidden_size), the target's are 64"),
        ({"target_hidden_size": 32}, "width 32 (target_hidden_size)"),
        ({"vocab_size": 99}, "99 tokens"),
        ({"draft_vocab_size": 200}, "draft_vocab_size"),
        ({"num_target_layers": 9}, "made for a target of 9 layers"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [8]}}, "after layer 9, the target has 8"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "no mask_token_id"),
        ({"dflash_config": {"mask_token_id": 100}}, "mask_token_id is 100, and the target has 100 tokens"),
        ({"dflash_config": {"mask_token_id": -7}}, "mask_token_id is -7"),
        ({"dspark_noise_token_id": 999_999}, "mask_token_id is 999999"),
        ({"block_size": 0}, "block_size leaves no token"),
        ({"block_size": 1}, "block_size leaves no token"),
        ({"block_size": -4}, "block_size leaves no token"),
        ({"dflash_config": {"mask_token_id": 4, "selector_top_k": 0}}, "selector_top_k is 0"),
        ({"max_position_embeddings": 64}, "has 64 positions (max_position_embeddings), and a request may take 4096"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "is an MLPSpeculator"),
        ({"dflash_config": {"mask_token_id": 4, "projector_type": "domino"}}, "domino"),
        ({"markov_head_type": "wide"}, "markov_head_type is wide"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "no block drafter"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "no block drafter that is served"),
        ({"block_size": "8"}, "block_size is '8'"),
    ],
    ids=str,
)
def test_block_draft_for_another_target_is_refused_with_field(folder: Any, update: Any, reason: str) -> None:
    target = folder("target", {**QWEN3, "max_position_embeddings": 4096})
    assert reason in dropped(target, block(folder("draft", {**DFLASH, **update})))


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({}, "has no MTP layers"),
        ({"num_nextn_predict_layers": 0}, "has no MTP layers"),
        ({"num_nextn_predict_layers": 8}, "has 8 MTP modules"),
        ({"num_nextn_predict_layers": 1}, ""),
        ({"mtp_num_hidden_layers": 1}, ""),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, ""),
        ({"mtp_config": {"num_nextn_predict_layers": 1}}, ""),
        ({"num_mtp_modules": 1}, ""),
        *(({"model_type": kind}, "") for kind in ("longcat_flash", "qwen3_next", "hy_v4", "dots3_note")),
        ({"model_type": "mimo_v2_flash", "num_nextn_predict_layers": 3}, ""),
        ({"model_type": "qwen3_next", "num_nextn_predict_layers": 0}, "has no MTP layers"),
    ],
    ids=str,
)
def test_mtp_needs_a_target_with_one_module(folder: Any, update: Any, reason: str) -> None:
    why = dropped(folder("target", {**QWEN3, **update}), mtp())
    assert reason in why
    assert bool(why) == bool(reason)


def test_fields_of_a_target_in_another_sense_refuse_no_draft(folder: Any) -> None:
    """Bug: fields of block drafters were checked in the target's config, too, where they may mean something else."""
    other = {"block_size": [128, 128], "mask_token_id": [0, 1], "dflash_config": "none", "transformer_layer_config": 1}
    assert dropped(folder("target", {**LLAMA, **other}), eagle(folder("head", EAGLE3))) == ""
