"""Models in their published formats, made in seconds for tests of mechanics: targets, with MTP layers or without, and
drafters for them.

Weights are random, so that tokens depend on all that a model reads. Markov heads, MTP layers and the models that count
are planted, so that some proposals are accepted. They say nothing of acceptance rates.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.engine.engines import EAGLE_HEAD, SMALL

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]
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
COUNTING_SIZES: Config = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
COUNTING_LAYERS = 4
COUNTED_TOKENS = 6
"""Tokens of a circle in which a counting model goes round."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def target_config(source: Path = SMALL) -> Config:
    config: Config = json.loads((source / "config.json").read_text())
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


class Counting(NamedTuple):
    """A target, a head and a draft model for it."""

    target: Path
    head: Path
    draft: Path
    """The target's first layer."""


def counting(folder: Path) -> Counting:
    target, head = counting_llama(folder / "target"), counting_head(folder / "head")
    return Counting(target, head, counting_llama(folder / "draft", layers=1))


def counting_llama(folder: Path, layers: int = COUNTING_LAYERS, scale: float = 1.2, **sizes: int) -> Path:
    """A Llama with the small target's vocabulary, in a tenth of its time. It counts in circles, with mistakes that
    depend on all tokens before. Fewer `layers` are the first ones: a draft that is often right.
    scale: of what a layer adds; the larger, the more depends on the context."""
    config = _counting_config() | {"num_hidden_layers": layers} | sizes
    embedding = _counting_embedding(config)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": _counting_output(embedding)}
    weights["model.norm.weight"] = torch.ones(config["hidden_size"])
    for number in range(layers):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number + 1)
            layer = decoder_layer(config, f"model.layers.{number}.")
        for name, factor in (("self_attn.q_proj", 3.0), ("self_attn.o_proj", scale), ("mlp.down_proj", scale)):
            layer[f"model.layers.{number}.{name}.weight"] *= factor
        weights |= layer
    return save(folder, config, weights, tokenizer=SMALL)


def counting_head(folder: Path, layers: Sequence[int] = (1, 2, 3)) -> Path:
    """An EAGLE-3 head for the counting Llama. It counts on from its token, and mostly leaves out the mistakes.

    layers: before which it reads hidden states."""
    config = _counting_config() | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [*layers],
    }  # fmt: skip
    width, layer, embedding = config["hidden_size"], "midlayer.", _counting_embedding(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = decoder_layer(config, layer, scale=0.3)
        look = torch.randn(width, width) * width**-0.5  # attention finds the token itself
    nothing, same = torch.zeros(width, width), torch.eye(width)
    for name, of_token in (("q", 1.5 * look), ("k", look), ("v", same)):
        weights[f"{layer}self_attn.{name}_proj.weight"] = torch.cat([of_token, nothing], dim=1)
    weights |= {
        f"{layer}self_attn.o_proj.weight": same,
        f"{layer}hidden_norm.weight": torch.full((width,), 0.3),
        "fc.weight": torch.cat([same, same, same], dim=1),
        "norm.weight": torch.ones(width),
        "lm_head.weight": _counting_output(embedding),
    }
    return save(folder, config, weights)


def _counting_config() -> Config:
    return target_config() | COUNTING_SIZES | {"tie_word_embeddings": False, "dtype": "float32"}


def _counting_embedding(config: Config) -> torch.Tensor:
    """Tokens of a circle are alike, so that several are probable where a sampled request draws."""
    random, width, tokens = torch.Generator().manual_seed(0), config["hidden_size"], config["vocab_size"]
    circles = torch.randn(tokens // COUNTED_TOKENS, width, generator=random).repeat_interleave(COUNTED_TOKENS, dim=0)
    own = torch.randn(tokens, width, generator=random)
    return (7**0.5 * circles + 3**0.5 * own) / 10**0.5


def _counting_output(embedding: torch.Tensor) -> torch.Tensor:
    """Each row answers to the token before it in its circle."""
    token = torch.arange(len(embedding))
    return 0.25 * embedding[token - token % COUNTED_TOKENS + (token - 1) % COUNTED_TOKENS]


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


def dflash2(folder: Path, taps: int = 2, group: int = 16, rank: int = 32, **sizes: int) -> Path:
    """DFlash with convolutions over the block, and a walk over the best candidates of each position."""
    config, weights = _block_draft(2, **sizes)
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


def in_speculators_format(folder: Path, kind: str = "dflash", **more_sizes: Any) -> Path:
    """A DFlash draft as the library `speculators` saves it: its own vocabulary, and layers counted from 1."""
    config, weights = _block_draft(2, **more_sizes)
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


def even_heads_of_small(folder: Path) -> Path:
    """The small target without a third of its heads, so that two ranks can share it."""
    heads, kv_heads = 6, 2
    config = target_config() | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "dtype": "float32"}
    weights, head = _target_weights(), config["head_dim"]
    for name in [name for name in weights if ".self_attn." in name]:
        if name.endswith("o_proj.weight"):
            weights[name] = weights[name][:, : heads * head]
        else:
            weights[name] = weights[name][: (heads if "q_proj" in name else kv_heads) * head]
    return save(folder, config, weights, tokenizer=SMALL)


def mimo(folder: Path, source: Path = SMALL) -> Path:
    """A Llama as a MiMo (Qwen2's layers with biases of zero). Its MTP layer mostly repeats its token."""
    target, weights = target_config(source), _target_weights(source)
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
    """A Qwen3-Next with one MTP layer, which hands out hidden states. Target and MTP layer count in circles,
    with mistakes.

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
    width, small = target["hidden_size"], _target_weights()["model.embed_tokens.weight"]
    embedding = small if width == small.shape[1] else small.std() * _counting_embedding(config)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": _counting_output(embedding)}
    for prefix in (*(f"model.layers.{number}." for number in range(layers)), "mtp.layers.0."):
        weights |= _attention_layer_with_gate(config, prefix, with_experts=prefix.endswith("layers.0."))
    for number in recurrent:
        weights = _with_state(config, weights, f"model.layers.{number}.")
    for norm in ("model.norm", "mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"):
        weights[f"{norm}.weight"] = torch.zeros(width)  # vLLM adds 1
    weights["mtp.fc.weight"] = torch.cat([torch.eye(width), 0.1 * torch.eye(width)], dim=1)
    return save(folder, config, weights, tokenizer=SMALL)


def mamba2(folder: Path, inner: int = 256, state: int = 16) -> Path:
    """A Mamba-2 of one layer with the small target's vocabulary: all that it knows of a request is a state."""
    vocabulary, width, head, taps = target_config()["vocab_size"], 64, 64, 4
    heads, mixed = inner // head, inner + 2 * state
    config = {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": vocabulary, "hidden_size": width,
        "state_size": state, "num_hidden_layers": 1, "num_heads": heads, "head_dim": head, "n_groups": 1, "expand": 4,
        "conv_kernel": taps, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    prefix = "backbone.layers.0."
    weights = {
        "backbone.embeddings.weight": torch.randn(vocabulary, width),
        "backbone.norm_f.weight": torch.ones(width),
        f"{prefix}norm.weight": torch.ones(width),
        f"{prefix}mixer.in_proj.weight": torch.randn(inner + mixed + heads, width) * width**-0.5,
        f"{prefix}mixer.conv1d.weight": torch.randn(mixed, 1, taps) * taps**-0.5,
        f"{prefix}mixer.conv1d.bias": torch.zeros(mixed),
        f"{prefix}mixer.dt_bias": torch.ones(heads),
        f"{prefix}mixer.A_log": torch.zeros(heads),
        f"{prefix}mixer.D": torch.ones(heads),
        f"{prefix}mixer.norm.weight": torch.ones(inner),
        f"{prefix}mixer.out_proj.weight": torch.randn(width, inner) * inner**-0.5,
    }
    return save(folder, config, weights)


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


def _target_weights(source: Path = SMALL) -> Weights:
    return {name: weight.float() for name, weight in load_file(source / "model.safetensors").items()}


def save(folder: Path, config: Config, weights: Weights, tokenizer: Path | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            shutil.copy(tokenizer / name, folder)
    return folder
