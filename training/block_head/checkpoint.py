"""A block head as the folder that vLLM loads with `{"method": "dspark", "model": FOLDER}`."""

from __future__ import annotations

from pathlib import Path

import torch

from training.block_head.head import BLOCK, MARKOV_RANK, READ, ROPE_THETA, BlockHead, inner_size
from training.eagle3.checkpoint import fill, parameters, read_head, write_head
from training.target import CannotTrainError, Target

COMPARED = "t2d"
"""EAGLE's name for the tokens that a head was trained on; vLLM does not read it."""


def save(head: BlockHead, target: Target, folder: Path) -> None:
    compared = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    compared[head.compared.cpu()] = True
    write_head(folder, parameters(head, target) | {COMPARED: compared}, head_config(target, head.mask_token))


def head_config(target: Target, mask_token: int) -> dict[str, object]:
    """Make a config with DSpark's published fields: layers count from 0, and a block's first token proposes, too."""
    of_target = target.config
    copied = (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "hidden_act", "max_position_embeddings", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **{name: getattr(of_target, name) for name in copied},
        "dtype": str(of_target.dtype or torch.bfloat16).removeprefix("torch."),
        "num_hidden_layers": 1,
        "intermediate_size": inner_size(of_target),
        "attention_bias": True,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "num_target_layers": of_target.num_hidden_layers,
        "target_layer_ids": read_layers(target),
        "block_size": BLOCK,
        "mask_token_id": mask_token,
        "sample_from_anchor": True,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


def read_layers(target: Target) -> list[int]:
    return [layer - 1 for layer in target.layers[-READ:]]


def load(folder: Path, target: Target) -> BlockHead:
    """Load the head in a folder; raises CannotTrainError if there is none, or it is for another target."""
    tensors, config = read_head(folder, "block head")
    if config.get("target_layer_ids") != read_layers(target) or config.get("block_size") != BLOCK:
        raise CannotTrainError(
            f"The head in {folder} proposes {config.get('block_size')} tokens from the layers "
            f"{config.get('target_layer_ids')}, this trains {BLOCK} from {read_layers(target)}."
        )
    compared = tensors.pop(COMPARED, torch.ones(target.config.vocab_size, dtype=torch.bool))
    head = BlockHead(target.config, int(config["mask_token_id"]), compared.nonzero().flatten())
    return fill(head, tensors, target, folder)
