"""The model families that this engine serves: Llama-like decoders. Others are refused before any weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from outrider_runtime.model_config import Config, UnreadableConfigError, config_file, read_config

FAMILIES = {"llama": "Llama, SmolLM2", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""`model_type` of config.json -> the models that have it."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of which any marks a mixture of experts."""
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
OTHER_SIZES = ("num_key_value_heads", "head_dim")
"""Optional sizes, derived from the others when they are missing."""
TYPES: dict[type, tuple[str, ...]] = {
    str: ("model_type",), list: ("layer_types",), dict: ("rope_parameters", "rope_scaling"),
    bool: ("tie_word_embeddings", "attention_bias", "mlp_bias"),
}  # fmt: skip
TYPE_NAMES = {str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
DTYPES = ("float32", "bfloat16", "float16")


class UnsupportedModelError(Exception):
    """The model cannot be served; the message names the file and the field."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and options of one model, as its config.json gives them."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner_width: int
    norm_epsilon: float
    is_tied: bool
    """Whether the output layer reuses the embedding matrix."""
    has_input_biases: bool
    """Whether the query, key and value projections have biases."""
    has_output_bias: bool
    """Whether the attention's output projection has a bias."""
    has_mlp_biases: bool
    has_head_norms: bool
    """Whether queries and keys are normalised, head by head (Qwen3)."""
    positions: int
    """Tokens of the longest request that the model was trained for."""
    dtype: str
    """The type in which the weights are stored."""

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * bytes_per_number


def read_architecture(folder: Path) -> Architecture:
    """Read and check the model's configuration. Raises UnsupportedModelError."""
    return parse_architecture(read_unchecked_config(folder), config_file(folder))


def read_unchecked_config(folder: Path) -> Config:
    """Read the model's configuration, unchecked. Raises UnsupportedModelError when it cannot be read."""
    try:
        return read_config(folder)
    except UnreadableConfigError as error:
        raise UnsupportedModelError(str(error)) from None


def parse_architecture(config: Config, file: Path) -> Architecture:
    """Check `config` and read the architecture from it. Raises UnsupportedModelError, which names `file`."""
    reason = _find_mistyped(config) or _obstacle(config) or _misfit(config)
    if reason:
        raise UnsupportedModelError(f"{file}: {reason}")
    return _architecture(config)


def _architecture(config: Config) -> Architecture:
    heads, family = config["num_attention_heads"], config["model_type"]
    return Architecture(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or config["hidden_size"] // heads,
        inner_width=config["intermediate_size"],
        norm_epsilon=float(config["rms_norm_eps"]),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_input_biases=family == "qwen2" or bool(config.get("attention_bias")),
        has_output_bias=family != "qwen2" and bool(config.get("attention_bias")),
        has_mlp_biases=family == "llama" and bool(config.get("mlp_bias")),
        has_head_norms=family == "qwen3",
        positions=config["max_position_embeddings"],
        dtype=_dtype(config),
    )


def _misfit(config: Config) -> str:
    """Name a size that is missing or impossible; empty when there is none."""
    numbers = {field: config.get(field) for field in SIZES}
    numbers |= {field: config[field] for field in OTHER_SIZES if config.get(field) is not None}
    for field, value in numbers.items():
        if value is None:
            return f"the field {field} is missing"
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{field} is {value!r}, which is not a whole number above zero"
    bases = [source["rope_theta"] for source in (config, _rope(config)) if source.get("rope_theta") is not None]
    for field, value in [("rms_norm_eps", config.get("rms_norm_eps")), *(("rope_theta", base) for base in bases)]:
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
            return f"{field} is {value!r}, which is not a number above zero"
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if heads % kv_heads:
        return f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads, {heads}"
    if _dtype(config) not in DTYPES:
        return f"dtype is {_dtype(config)!r}; the Torch backend reads {', '.join(DTYPES)}"
    return ""


def _find_mistyped(config: Config) -> str:
    """Name a field of the wrong JSON type; empty when there is none."""
    for kind, fields in TYPES.items():
        for field in fields:
            if config.get(field) is not None and not isinstance(config[field], kind):
                return f"{field} is {config[field]!r}, which is not {TYPE_NAMES[kind]}"
    return ""


def _rope(config: Config) -> Config:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _dtype(config: Config) -> Any:
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _obstacle(config: Config) -> str:
    """Say why this engine cannot serve the model, in a sentence that begins with the field; empty when it can."""
    for field in EXPERTS:
        if config.get(field):
            return f"{field} is {config[field]}: the Torch backend does not serve a mixture of experts, use vLLM"
    if config.get("model_type") not in FAMILIES:
        known = ", ".join(f"{name} ({models})" for name, models in FAMILIES.items())
        return f"model_type is {config.get('model_type')!r}; the Torch backend serves {known}"
    if config.get("quantization_config"):
        return "quantization_config is set: the Torch backend reads unquantised weights, use vLLM"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act is {config['hidden_act']!r}; the Torch backend has silu only"
    return _rotation(config) or _sliding(config)


def _rotation(config: Config) -> str:
    """Refuse longrope: its rotation depends on the longest request of a step, so neighbours would change an answer."""
    if "longrope" in (_rope(config).get("rope_type"), _rope(config).get("type")):
        return "rope_type is longrope: the Torch backend has one rotation for all context lengths, use vLLM"
    return ""


def _sliding(config: Config) -> str:
    """Refuse attention that does not see all tokens."""
    if config.get("sliding_window") and config.get("use_sliding_window", config["model_type"] == "llama"):
        return f"sliding_window is {config['sliding_window']}: the Torch backend attends to all tokens, use vLLM"
    others = [layer_type for layer_type in config.get("layer_types") or [] if layer_type != "full_attention"]
    return f"layer_types names {others[0]}: the Torch backend has full_attention only, use vLLM" if others else ""
