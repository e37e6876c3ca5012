"""The shape of a model that a manifest names, from the configurations that aiconfigurator-core brings."""

from __future__ import annotations

import json
import re
from pathlib import Path

from outrider_runtime.simulate.errors import SimulationError
from outrider_runtime.simulate.worlds.compose import PACKAGE
from outrider_runtime.simulate.worlds.shapes import LLAMA_1B, Shape

ENDING = "_config.json"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_of(model: str) -> Shape:
    """By name, whoever publishes it: `me/Llama-3.1-8B-Instruct` is Meta-Llama-3.1-8B.

    Raises SimulationError where the package is not there, or has no such dense model.
    """
    configs = _configs()
    config = configs.get(_plain(model))
    if config is None and _plain(model) == _plain("Llama-3.2-1B"):
        return LLAMA_1B
    if config is None:
        raise SimulationError(f"{PACKAGE} has no configuration of {model}; it has {', '.join(sorted(configs))}")
    return _shape(model, json.loads(config.read_text()))


def _configs() -> dict[str, Path]:
    try:
        import aiconfigurator_core
    except ImportError as error:
        raise SimulationError(
            f"composing step times needs the package {PACKAGE}: pip install 'outrider[bench]'"
        ) from error
    folder = Path(aiconfigurator_core.__file__).parent / "model_configs"
    return {_plain(path.name.removesuffix(ENDING).replace("--", "/")): path for path in folder.glob(f"*{ENDING}")}


def _plain(model: str) -> str:
    """Without publisher, `Meta-`, `-Instruct`, and what is no letter or digit."""
    name = model.rpartition("/")[2].lower()
    name = re.sub(r"^meta-|-(instruct|chat|it|base|hf)$", "", name)
    return re.sub(r"[^a-z0-9.]", "", name)


def _shape(model: str, config: dict[str, int]) -> Shape:
    if any(config.get(name) for name in EXPERTS):
        raise SimulationError(f"{model} is a mixture of experts; the dry run composes dense models")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        head_dim=config.get("head_dim") or hidden // heads,
    )
