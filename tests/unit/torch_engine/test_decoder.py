"""The decoder computes what transformers computes, for every model family."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from outrider_runtime.torch_engine.architecture import UnsupportedModelError, read_architecture
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.linear import Linear
from outrider_runtime.torch_engine.model_runner import CachedModel, Segment
from outrider_runtime.torch_engine.weights import INDEX
from safetensors.torch import load_file, save_file

from tests.unit.torch_engine.models import FAMILIES, VOCABULARY, write_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """Chunks of several requests share each pass; every logit is within 1e-4 of that of the whole text in one pass."""
    reference = write_model(tmp_path, **FAMILIES[family])
    ours = CachedModel(tmp_path, 0, dtype=torch.float32, device=CPU)
    pool = KVPool(1 << 24, [ours.cache.bytes_per_token], 256)
    draws = random.Random(1)
    texts = {name: [draws.randrange(VOCABULARY) for _ in range(length)] for name, length in {"a": 150, "b": 7}.items()}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    while any(ours.cache.length(name) < len(text) for name, text in texts.items()):
        segments = []
        for name, text in texts.items():
            begin = ours.cache.length(name)
            end = min(len(text), begin + draws.choice([1, 2, 5, 70]))
            if begin < end:
                assert pool.grow(Holder(0, name), end)
                segments.append(Segment(name, text[begin:end], begin))
        made = ours.decoder.logits(ours.run(segments, pool).last)
        for segment, rows in zip(segments, made.split([len(segment.tokens) for segment in segments]), strict=True):
            logits[segment.request].append(rows)
    for name, text in texts.items():
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).logits[0]
        assert (torch.cat(logits[name]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-1)])
def test_packed_weights_multiply_like_unpacked_ones(dtype: torch.dtype, most: float) -> None:
    """Packing changes no product, of one row or of many, and the matrix can be restored bit by bit."""
    random_ = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(37, 19, generator=random_).to(dtype), torch.randn(37, generator=random_).to(dtype)
    packed = Linear(weight, bias).pack()
    for rows in (1, 16, 70):
        x = torch.randn(rows, 19, generator=random_).to(dtype)
        expected = x.double() @ weight.double().T + bias.double()
        assert (packed(x).double() - expected).abs().max() < most
    assert packed.rows(torch.tensor([36, 3])).equal(weight[[36, 3]])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, "model_type"),
        ({"model_type": "mixtral", "num_local_experts": 4}, "num_local_experts"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "24"}, "hidden_size is '24'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -5}, "rms_norm_eps is -5"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -5}}, "rope_theta is -5"),
        ({"layer_types": 5}, "layer_types is 5, which is not a list"),
        ({"layer_types": [["a"]]}, r"layer_types names \['a'\]"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\], which is not a string"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x', which is not an object"),
        ({"rope_scaling": 5}, "rope_scaling is 5, which is not an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', which is not a boolean"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type is longrope"),
        ({"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}, "rope_parameters cannot be used"),
    ],
)
def test_unsupported_config_is_refused_by_file_and_field(fields: dict[str, object], named: str, tmp_path: Path) -> None:
    write_model(tmp_path, model_type="llama")
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(UnsupportedModelError, match=rf"{file}.*{named}"):
        CachedModel(tmp_path, 0, dtype=None, device=CPU)


def test_integer_norm_epsilon_is_accepted(tmp_path: Path) -> None:
    """Bug: 1 in place of 1.0, as some JSON writers have it, was refused."""
    write_model(tmp_path, model_type="llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1}))
    assert read_architecture(tmp_path).norm_epsilon == 1.0


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ([], "weight_map"), (5, "weight_map"), ({"weight_map": []}, "weight_map"),
        ({"weight_map": {"a": 5}}, "names 5"),
        ({"weight_map": {"a": "../model.safetensors"}}, r"names '\.\./model\.safetensors'"),
    ],
)  # fmt: skip
def test_invalid_or_escaping_weight_index_is_refused(tmp_path: Path, document: object, named: str) -> None:
    """A model's folder is not trusted: its files must not choose what the pod reads."""
    write_model(tmp_path, model_type="llama")
    index = tmp_path / INDEX
    index.write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match=rf"{index}: weight_map.*{named.removeprefix('weight_map')}"):
        CachedModel(tmp_path, 0, dtype=None, device=CPU)


def test_truncated_weights_are_refused_by_file(tmp_path: Path) -> None:
    write_model(tmp_path, model_type="llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedModelError, match=rf"{file}.*cut off"):
        CachedModel(tmp_path, 0, dtype=None, device=CPU)


def test_weights_of_other_model_are_refused_by_tensor(tmp_path: Path) -> None:
    """Two layers fewer than the file holds, and another width."""
    write_model(tmp_path, model_type="llama")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\."):
        CachedModel(tmp_path, 0, dtype=None, device=CPU)
    file.write_text(json.dumps({**config, "intermediate_size": 44}))
    with pytest.raises(UnsupportedModelError, match=r"mlp\.gate_proj\.weight has shape \[40, 24\].*\[44, 24\]"):
        CachedModel(tmp_path, 0, dtype=None, device=CPU)


def test_weights_that_are_not_finite_are_refused_by_tensor(tmp_path: Path) -> None:
    """They were served: each answer was empty, or each proposal was in vain."""
    write_model(tmp_path, model_type="llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"the tensor model\.norm\.weight has NaN"):
        CachedModel(tmp_path, 0, dtype=None, device=CPU)


@pytest.mark.parametrize(
    ("family", "gone"),
    [
        ("Qwen2", ["q_proj.bias", "k_proj.bias", "v_proj.bias"]), ("Qwen2", ["k_proj.bias"]),
        ("Qwen3", ["q_norm.weight", "k_norm.weight"]), ("Llama with biases", ["up_proj.bias"]),
    ],
)  # fmt: skip
def test_weights_without_bias_or_norm_are_refused_by_tensor(family: str, gone: list[str], tmp_path: Path) -> None:
    """Bug: a missing bias or norm was ignored, and wrong answers were served."""
    write_model(tmp_path, **FAMILIES[family])
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not any(name.endswith(part) for part in gone)}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"has no tensor model\.layers\.0\..*{gone[0]}"):
        CachedModel(tmp_path, 0, dtype=None, device=CPU)
