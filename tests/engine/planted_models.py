"""Block drafters and targets with MTP layers in their published formats, made in seconds for tests of mechanics.

Weights are random, so that proposals depend on all that a drafter reads. A Markov head and MTP layers are planted, so
that some of their proposals are accepted. They say nothing of acceptance rates.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.engines import EAGLE_HEAD, SMALL

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]
EVEN_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
"""Sizes that two ranks can share."""
TARGET_LAYERS = [0, 2, 4]
"""Layers of the small target after which a block drafter reads hidden states."""
BLOCK_TOKENS = 8
MASK_TOKEN = 4
MARKOV_RANK = 256
"""Tokens that a planted Markov head knows a successor of."""
DRAFT_VOCABULARY = 1024
"""Tokens of a checkpoint in the speculators format, the first ones of the target."""
COPIED_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "num_key_value_heads",
    "max_position_embeddings", "vocab_size", "rms_norm_eps", "hidden_act", "dtype",
)  # fmt: skip
RECURRENT_SIZES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def target_config() -> Config:
    config: Config = json.loads((SMALL / "config.json").read_text())
    return config


def decoder_layer(config: Config, prefix: str, scale: float = 1.0) -> Weights:
    """Random weights of a layer, by the checkpoint's names; without norms of queries and keys."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    made = {f"{prefix}{name}.weight": scale * torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    return made | {f"{prefix}{name}_layernorm.weight": torch.ones(width) for name in ("input", "post_attention")}


def head_norms(config: Config, prefix: str) -> Weights:
    size = config["head_dim"]
    return {f"{prefix}self_attn.{name}_norm.weight": torch.ones(size) + 0.1 * torch.randn(size) for name in "qk"}


def _block_draft(layers: int, **sizes: int) -> tuple[Config, Weights]:
    """A few Qwen3 layers over a projection of the target's hidden states. sizes: fields that are not the target's."""
    target = target_config() | sizes
    width, read = target["hidden_size"], target["hidden_size"] * len(TARGET_LAYERS)
    config = {
        **{name: target[name] for name in COPIED_FIELDS},
        "model_type": "qwen3", "num_hidden_layers": layers, "block_size": BLOCK_TOKENS, "attention_bias": False,
        "rope_theta": 100000.0, "tie_word_embeddings": False, "num_target_layers": target["num_hidden_layers"],
    }  # fmt: skip
    weights = {"fc.weight": torch.randn(width, read) * read**-0.5}
    weights |= {f"{name}.weight": torch.ones(width) + 0.1 * torch.randn(width) for name in ("hidden_norm", "norm")}
    for number in range(layers):
        prefix = f"layers.{number}."
        weights |= decoder_layer(config, prefix) | head_norms(config, prefix)
    return config, weights


def dflash(folder: Path, layers: int = 2, **sizes: int) -> Path:
    config, weights = _block_draft(layers, **sizes)
    config["architectures"] = ["DFlashDraftModel"]
    config["dflash_config"] = {"mask_token_id": MASK_TOKEN, "target_layer_ids": TARGET_LAYERS}
    return save(folder, config, weights)


def dflash2(folder: Path, taps: int = 2, group: int = 16, rank: int = 32) -> Path:
    """DFlash with convolutions over the block, and a walk over the best candidates of each position."""
    config, weights = _block_draft(2)
    width = config["hidden_size"]
    for name in (f"layers.{number}.{part}" for number in range(2) for part in ("attention_conv", "mlp_conv")):
        weights[f"{name}.base_kernel"] = torch.randn(2, taps, width) * 0.1 + 0.5
        weights[f"{name}.kernel_projection.weight"] = torch.randn(2 * taps * width // group, width) * 0.01
    for part in ("predecessor", "successor"):
        weights[f"candidate_selector.{part}_codebook"] = torch.randn(config["vocab_size"], rank)
    weights["candidate_selector.hidden_projection.weight"] = torch.randn(rank, width) * width**-0.5
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] = {
        "mask_token_id": MASK_TOKEN, "target_layer_ids": TARGET_LAYERS, "conv_kernel_size": taps,
        "conv_group_size": group, "selector_rank": rank, "selector_top_k": 4,
    }  # fmt: skip
    return save(folder, config, weights)


def dspark(
    folder: Path, successors: Mapping[int, int], layers: int = 1, confidence: float = 0.0, **sizes: int
) -> Path:  # fmt: skip
    """successors: token -> the token that the planted Markov head says comes next. confidence: log-odds around which
    the trained head's are."""
    config, weights = _block_draft(layers, **sizes)
    vocabulary, width = config["vocab_size"], config["hidden_size"]
    before, after = torch.zeros(vocabulary, MARKOV_RANK), 0.01 * torch.randn(vocabulary, MARKOV_RANK)
    for place, (token, successor) in enumerate(list(successors.items())[:MARKOV_RANK]):
        before[token, place], after[successor, place] = 1.0, 1000.0
    weights |= {
        "markov_head.markov_w1.weight": before,
        "markov_head.markov_w2.weight": after,
        "confidence_head.proj.weight": 0.01 * torch.randn(1, width + MARKOV_RANK),
        "confidence_head.proj.bias": torch.full((1,), confidence),
    }
    config |= {
        "architectures": ["Qwen3DSparkModel"], "target_layer_ids": TARGET_LAYERS, "mask_token_id": MASK_TOKEN,
        "markov_rank": MARKOV_RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "sample_from_anchor": True,
    }  # fmt: skip
    return save(folder, config, weights)


def in_speculators_format(folder: Path, kind: str = "dflash") -> Path:
    """A DFlash draft as the library `speculators` saves it: its own vocabulary, and layers counted from 1."""
    config, weights = _block_draft(2)
    sizes = {name: config.pop(name) for name in (*COPIED_FIELDS, "model_type", "num_hidden_layers", "rope_theta")}
    weights["lm_head.weight"] = torch.randn(DRAFT_VOCABULARY, sizes["hidden_size"])
    weights["d2t"] = torch.zeros(DRAFT_VOCABULARY, dtype=torch.int64)
    config = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": kind, "block_size": BLOCK_TOKENS,
        "mask_token_id": MASK_TOKEN, "draft_vocab_size": DRAFT_VOCABULARY,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in TARGET_LAYERS], "transformer_layer_config": sizes,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK_TOKENS - 1}],
            "verifier": {"name_or_path": "small", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    return save(folder, config, weights)


def eagle_of_small(folder: Path, **update: Any) -> Path:
    """The example's EAGLE-3 head, set to read layers that the small target has. update: of its config."""
    shutil.copytree(EAGLE_HEAD, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    (folder / "config.json").write_text(json.dumps({**config, **layers, **update}))
    return folder


def mimo(folder: Path) -> Path:
    """The small target as a MiMo (Qwen2's layers with biases of zero). Its MTP layer mostly repeats its token."""
    target, weights = target_config(), _target_weights()
    config = {
        **target, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1,
        "attention_bias": True, "rope_theta": 100000.0, "use_sliding_window": False,
    }  # fmt: skip
    prefix, width = "model.mtp_layers.0.", target["hidden_size"]
    weights |= decoder_layer(config, prefix, scale=0.3)
    for name in (*(f"model.layers.{number}." for number in range(target["num_hidden_layers"])), prefix):
        for part in "qkv":
            rows = len(weights[f"{name}self_attn.{part}_proj.weight"])
            weights[f"{name}self_attn.{part}_proj.bias"] = torch.zeros(rows)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{prefix}{norm}.weight"] = torch.ones(width)
    weights[f"{prefix}input_proj.weight"] = torch.cat([0.3 * torch.eye(width), torch.eye(width)], dim=1)
    return save(folder, config, weights, tokenizer=SMALL)


def in_8_bits(folder: Path, source: Path, ignored: Sequence[str]) -> Path:
    """A target whose layers are stored in 8 bits (compressed-tensors), those of its MTP layers in full. ignored: what
    its config says is stored in full."""
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if name.startswith("model.layers.") and name.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(dim=1, keepdim=True) / 127
        weights[f"{name}_scale"] = scale
        weights[name] = (weights[name] / scale).round().to(torch.int8)
    values = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"], "weights": {**values, "strategy": "channel", "dynamic": False},
        "input_activations": {**values, "strategy": "token", "dynamic": True},
    }  # fmt: skip
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ["lm_head", *ignored],
    }  # fmt: skip
    return save(folder, config, weights, tokenizer=SMALL)


def qwen3_next(
    folder: Path, layers: int = 6, experts: int = 4, inner: int = 64, recurrent: Sequence[int] = (), **sizes: Any
) -> Path:  # fmt: skip
    """A Qwen3-Next with one MTP layer, which hands out hidden states. Target and MTP layer count through the
    vocabulary, with mistakes.

    recurrent: layers that keep a state (linear attention) in place of keys and values. sizes: fields that are not the
    small target's."""
    target = target_config() | sizes
    config = {
        **target, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": experts,
        "num_experts_per_tok": 2, "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner,
        "mlp_only_layers": [*range(1, layers)], "decoder_sparse_step": 1,
        "layer_types": ["linear_attention" if number in recurrent else "full_attention" for number in range(layers)],
        "num_hidden_layers": layers, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
        "rope_theta": 100000.0, "partial_rotary_factor": 0.25, "full_attention_interval": 1, **RECURRENT_SIZES,
    }  # fmt: skip
    config.pop("rope_parameters", None)
    width, embedding = target["hidden_size"], _target_weights()["model.embed_tokens.weight"]
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.roll(1, 0)}
    for prefix in (*(f"model.layers.{number}." for number in range(layers)), "mtp.layers.0."):
        weights |= _attention_layer_with_gate(config, prefix, with_experts=prefix.endswith("layers.0."))
    for number in recurrent:
        weights = _with_state(config, weights, f"model.layers.{number}.")
    for norm in ("model.norm", "mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"):
        weights[f"{norm}.weight"] = torch.zeros(width)  # vLLM adds 1
    weights["mtp.fc.weight"] = torch.cat([torch.eye(width), 0.1 * torch.eye(width)], dim=1)
    return save(folder, config, weights, tokenizer=SMALL)


def _attention_layer_with_gate(config: Config, prefix: str, *, with_experts: bool) -> Weights:
    layer = decoder_layer(config, prefix, scale=0.1) | head_norms(config, prefix)
    queries = layer[f"{prefix}self_attn.q_proj.weight"]
    layer[f"{prefix}self_attn.q_proj.weight"] = torch.cat([queries, torch.zeros_like(queries)])  # and gates
    if with_experts:
        layer = {name: weight for name, weight in layer.items() if ".mlp." not in name} | _experts(config, prefix)
    return {name: weight - 1 if "norm" in name else weight for name, weight in layer.items()}


def _with_state(config: Config, weights: Weights, prefix: str) -> Weights:
    """`weights` with linear attention in that layer."""
    width, heads, size = config["hidden_size"], config["linear_num_key_heads"], config["linear_key_head_dim"]
    keys, taps = heads * size, config["linear_conv_kernel_dim"]
    own = {
        "in_proj_qkvz.weight": torch.randn(4 * keys, width) * width**-0.5,
        "in_proj_ba.weight": torch.randn(2 * heads, width) * width**-0.5,
        "conv1d.weight": torch.randn(3 * keys, 1, taps) * taps**-0.5,
        "dt_bias": torch.ones(heads),
        "A_log": torch.zeros(heads),
        "norm.weight": torch.ones(size),
        "out_proj.weight": 0.1 * torch.randn(width, keys) * keys**-0.5,
    }
    kept = {name: weight for name, weight in weights.items() if not name.startswith(f"{prefix}self_attn.")}
    return kept | {f"{prefix}linear_attn.{name}": weight for name, weight in own.items()}


def _experts(config: Config, prefix: str) -> Weights:
    width, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    made = {
        f"{prefix}mlp.gate.weight": torch.randn(count, width),
        f"{prefix}mlp.shared_expert_gate.weight": torch.randn(1, width),
    }
    for name in (*(f"experts.{number}" for number in range(count)), "shared_expert"):
        made[f"{prefix}mlp.{name}.gate_proj.weight"] = 0.004 * torch.randn(inner, width)
        made[f"{prefix}mlp.{name}.up_proj.weight"] = 0.004 * torch.randn(inner, width)
        made[f"{prefix}mlp.{name}.down_proj.weight"] = 0.01 * torch.randn(width, inner)
    return made


def _target_weights() -> Weights:
    return {name: weight.float() for name, weight in load_file(SMALL / "model.safetensors").items()}


def save(folder: Path, config: Config, weights: Weights, tokenizer: Path | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            shutil.copy(tokenizer / name, folder)
    return folder
