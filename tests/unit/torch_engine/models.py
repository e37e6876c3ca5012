"""Tiny random models of each family, written as the folders that are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

torch.set_num_threads(1)

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "dtype": "float32",
    "initializer_range": 0.3,  # large enough for answers to depend on the prompt
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 3 with scaled rotations": {
        "model_type": "llama", "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "SmolLM2": {"model_type": "llama", "tie_word_embeddings": True},
    "Llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "Qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 8},
}  # fmt: skip


def write_model(folder: Path, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Write a random model to `folder`, and return it as transformers has it."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # biases and norms begin as zeros and ones
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return model.eval()


def write_pair(folder: Path, likeness: float) -> None:
    """Write a target and a draft: the target with one matrix of its last layer scaled by `likeness`.

    The nearer to 1, the more proposals are accepted.
    """
    write_model(folder / "target", model_type="llama")
    draft = write_model(folder / "draft", model_type="llama")
    with torch.no_grad():
        draft.model.layers[2].mlp.down_proj.weight.mul_(likeness)
    draft.save_pretrained(folder / "draft")


def write_head(folder: Path, seed: int = 5) -> None:
    """Write a random EAGLE-3 head for a model of SIZES, with a vocabulary of its own."""
    proposable = VOCABULARY // 2
    width, inner, head = SIZES["hidden_size"], SIZES["intermediate_size"], 6
    draws = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws) * 0.3

    tensors = {
        "fc.weight": random(width, 3 * width),
        "midlayer.input_layernorm.weight": 1 + random(width),
        "midlayer.hidden_norm.weight": 1 + random(width),
        "midlayer.post_attention_layernorm.weight": 1 + random(width),
        "midlayer.self_attn.q_proj.weight": random(4 * head, 2 * width),
        "midlayer.self_attn.k_proj.weight": random(2 * head, 2 * width),
        "midlayer.self_attn.v_proj.weight": random(2 * head, 2 * width),
        "midlayer.self_attn.o_proj.weight": random(width, 4 * head),
        "midlayer.mlp.gate_proj.weight": random(inner, width),
        "midlayer.mlp.up_proj.weight": random(inner, width),
        "midlayer.mlp.down_proj.weight": random(width, inner),
        "norm.weight": 1 + random(width),
        "lm_head.weight": random(proposable, width),
        "d2t": torch.arange(proposable),  # every other token
        "t2d": torch.arange(VOCABULARY) % 2 == 0,
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = AutoConfig.for_model(**{**SIZES, "model_type": "llama", "num_hidden_layers": 1})
    document = config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": proposable,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(document))


def write_medusa(folder: Path, seed: int = 7, heads: int = 3) -> None:
    """Write random Medusa heads for a model of SIZES, which propose every other token."""
    width, draws = SIZES["hidden_size"], torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {"vocabulary": torch.arange(0, VOCABULARY, 2, dtype=torch.int32)}
    for depth in range(heads):
        tensors[f"heads.{depth}.block.weight"] = torch.randn(width, width, generator=draws) * 0.3
        tensors[f"heads.{depth}.block.bias"] = torch.randn(width, generator=draws) * 0.3
        tensors[f"heads.{depth}.project.weight"] = torch.eye(width) + torch.randn(width, width, generator=draws) * 0.1
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    document = {
        "architectures": ["MedusaHeads"], "medusa_num_heads": heads, "hidden_size": width, "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY // 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(document))
