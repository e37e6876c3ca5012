"""Heads as the folder that the Torch backend loads: `method: Medusa`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from training.medusa.heads import Heads
from training.target import CannotTrainError, Target

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save(heads: Heads, target: Target, folder: Path) -> None:
    """Write each file under a temporary name and rename it, so that no half file is read. Pods may read the files."""
    tensors = {name: tensor.detach().half().cpu().contiguous() for name, tensor in heads.named_parameters()}
    tensors["vocabulary"] = heads.vocabulary.to(torch.int32).cpu()
    save_file(tensors, folder / f"{WEIGHTS}.partial", metadata={"format": "pt"})
    config = {
        "architectures": ["MedusaHeads"],
        "medusa_num_heads": len(heads.heads),
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "draft_vocab_size": len(heads.vocabulary),
        "dtype": "float16",
    }
    (folder / f"{CONFIG}.partial").write_text(json.dumps(config, indent=1) + "\n")
    for name in (CONFIG, WEIGHTS):
        partial = folder / f"{name}.partial"
        partial.chmod(0o644)
        partial.replace(folder / name)


def load(folder: Path, target: Target) -> Heads:
    """Load the heads in a folder; raises CannotTrainError if there are none, or they are for another target."""
    try:
        tensors = load_file(folder / WEIGHTS)
        config = json.loads((folder / CONFIG).read_text())
        heads = Heads(target.config.hidden_size, config["medusa_num_heads"], tensors["vocabulary"].long())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CannotTrainError(f"{folder} holds no Medusa heads: {error}") from None
    try:
        heads.load_state_dict(
            {name: tensor.float() for name, tensor in tensors.items()} | {"vocabulary": heads.vocabulary}
        )
    except RuntimeError as error:
        raise CannotTrainError(f"The heads in {folder} are for another target: {error}") from None
    return heads.to(target.device)
