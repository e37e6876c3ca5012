"""A head as the folder that vLLM loads with `{"method": "eagle3", "model": FOLDER}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from training.eagle3.head import Head
from training.target import CannotTrainError, Target

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save(head: Head, target: Target, folder: Path) -> None:
    tensors = parameters(head, target) | vocabulary_maps(head.vocabulary.cpu(), target.config.vocab_size)
    write_head(folder, tensors, head_config(target, len(head.vocabulary)))


def parameters(head: nn.Module, target: Target) -> dict[str, Tensor]:
    """Weights by name, in the target's type."""
    dtype = target.config.dtype or torch.bfloat16
    return {name: tensor.detach().to(dtype).cpu().contiguous() for name, tensor in head.named_parameters()}


def write_head(folder: Path, tensors: dict[str, Tensor], config: Mapping[str, object]) -> None:
    """Writes each file under a temporary name and renames it: never half a head. World-readable: a pod mounts it."""
    save_file(tensors, folder / f"{WEIGHTS}.partial", metadata={"format": "pt"})
    (folder / f"{CONFIG}.partial").write_text(json.dumps(config, indent=1) + "\n")
    for name in (CONFIG, WEIGHTS):
        partial = folder / f"{name}.partial"
        partial.chmod(0o644)
        partial.replace(folder / name)


def vocabulary_maps(vocabulary: Tensor, size: int) -> dict[str, Tensor]:
    """Make d2t (target token - draft token) and t2d (whether the draft has a target token).

    vLLM expects neither for a head with the whole vocabulary.
    """
    if len(vocabulary) == size:
        return {}
    drafted = torch.zeros(size, dtype=torch.bool)
    drafted[vocabulary] = True
    return {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": drafted}


def head_config(target: Target, draft_vocabulary: int) -> dict[str, object]:
    """Make a config: the target's with one layer, no biases, and the layers whose states the head fuses."""
    defaults = PretrainedConfig().to_dict()
    own = {name: value for name, value in target.config.to_dict().items() if defaults.get(name, ...) != value}
    own.pop("_name_or_path", None)  # a folder of this machine
    return own | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "mlp_bias": False,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocabulary,
        "num_aux_hidden_states": len(target.layers),
        "eagle_aux_hidden_state_layer_ids": list(target.layers),
    }


def read_head(folder: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read weights and configuration; raises CannotTrainError if there are none."""
    try:
        return load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CannotTrainError(f"{folder} holds no {kind}: {error}") from None


def load(folder: Path, target: Target) -> Head:
    """Load the head in a folder; raises CannotTrainError if there is none, or it is for another target."""
    tensors, config = read_head(folder, "EAGLE-3 head")
    layers = config.get("eagle_aux_hidden_state_layer_ids", list(target.layers))
    if list(layers) != list(target.layers):
        raise CannotTrainError(f"The head in {folder} fuses the layers {layers}, this trains on {list(target.layers)}.")
    offsets = tensors.pop("d2t", torch.zeros(target.config.vocab_size, dtype=torch.long))
    tensors.pop("t2d", None)
    return fill(Head(target.config, offsets + torch.arange(len(offsets))), tensors, target, folder)


Draft = TypeVar("Draft", bound=nn.Module)


def fill(head: Draft, tensors: Mapping[str, Tensor], target: Target, folder: Path) -> Draft:
    """Load the weights into `head`; raises CannotTrainError if their shapes differ."""
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise CannotTrainError(f"The head in {folder} is for another target: {error}") from None
    return head.to(target.device)
