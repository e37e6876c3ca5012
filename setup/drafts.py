"""Drafts for SmolLM2, next to it in the model folder: the EAGLE-3 head of training/models, and a poor draft model;
and a small target for tests.

The poor one is the target's own first layers: it proposes what the target seldom accepts, so that the loop has
something to decline. The small target says no sentence, and each of its tokens depends on all before it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from setup.model import build_model_once, model
from setup.steps import CACHE, REPOSITORY

SHIPPED_HEAD = REPOSITORY / "training" / "models" / "smollm2-135m-eagle3"
"""A file of the repository: training it takes 42 minutes on two cores, too long for a setup."""
EAGLE = CACHE / "models" / SHIPPED_HEAD.name
FIRST_LAYERS = CACHE / "models" / "smollm2-135m-first-layers"
FEW_LAYERS = CACHE / "models" / "smollm2-135m-few-layers"


def drafts() -> list[Path]:
    """Folders of all three, made where they are missing."""
    target = model()
    return [
        build_model_once(EAGLE, lambda folder: shutil.copytree(SHIPPED_HEAD, folder)),
        build_model_once(FIRST_LAYERS, lambda folder: _write_layers(target, folder, range(4))),
        build_model_once(FEW_LAYERS, lambda folder: _write_layers(target, folder, (0, 1, 2, 27, 28, 29))),
    ]


def _write_layers(target: Path, folder: Path, layers: Sequence[int]) -> None:
    """The target's embedding, these of its layers and its head."""
    from safetensors.torch import load_file, save_file  # only here: setup's other steps run before it is installed

    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    numbers = {f"model.layers.{layer}": f"model.layers.{number}" for number, layer in enumerate(layers)}
    weights = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        layer = ".".join(name.split(".")[:3])
        if not name.startswith("model.layers.") or layer in numbers:
            weights[numbers.get(layer, layer) + name.removeprefix(layer)] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = len(layers)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
