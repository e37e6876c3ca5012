"""Shapes of models by name: those of shipped worlds, and those that aiconfigurator-core knows."""

from __future__ import annotations

import json
import re
from pathlib import Path

from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.worlds.compose import PACKAGE, missing_package
from outrider_runtime.simulate.worlds.shapes import KNOWN, ModelShape

ENDING = "_config.json"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def find_shape(model: str) -> ModelShape:
    """Return the shape of a model by its name, without the publisher: `me/Llama-3.1-8B-Instruct` is Meta-Llama-3.1-8B.

    Raises SimulationError if the model is unknown and the package is missing, or has no such dense model.
    """
    if plain(model) in KNOWN:
        return KNOWN[plain(model)]
    configs = _configs(model)
    config = configs.get(plain(model))
    if config is None:
        raise SimulationError(f"{PACKAGE} has no configuration of {model}; it has {', '.join(sorted(configs))}")
    return _shape(model, json.loads(config.read_text()))


def _configs(model: str) -> dict[str, Path]:
    """Return the package's config files, by plain name. model: the name in the error."""
    try:
        import aiconfigurator_core
    except ImportError as error:
        raise missing_package(model) from error
    folder = Path(aiconfigurator_core.__file__).parent / "model_configs"
    return {plain(path.name.removesuffix(ENDING).replace("--", "/")): path for path in folder.glob(f"*{ENDING}")}


def plain(model: str) -> str:
    """Strip publisher, `Meta-`, `-Instruct`, and all but letters, digits and dots from a name."""
    name = model.rpartition("/")[2].lower()
    name = re.sub(r"^meta-|-(instruct|chat|it|base|hf)$", "", name)
    return re.sub(r"[^a-z0-9.]", "", name)


def _shape(model: str, config: dict[str, int]) -> ModelShape:
    if any(config.get(name) for name in EXPERTS):
        raise SimulationError(f"{model} is a mixture of experts; the dry run composes dense models")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        head_dim=config.get("head_dim") or hidden // heads,
    )
