"""A model's configuration as its folder holds it: config.json, or one GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
Config = dict[str, Any]


class UnreadableConfigError(ValueError):
    """The message names the file."""


def gguf_file(folder: Path) -> dict[str, str]:
    """What transformers must be told to read a folder that holds one GGUF file and no config.json; else nothing."""
    found = list(folder.glob("*.gguf"))
    return {"gguf_file": found[0].name} if len(found) == 1 and not (folder / CONFIG_FILE).exists() else {}


def config_file(folder: Path) -> Path:
    """Where the configuration stands, or would have to."""
    return folder / gguf_file(folder).get("gguf_file", CONFIG_FILE)


def read_config(folder: Path) -> Config:
    """Raises UnreadableConfigError."""
    file = config_file(folder)
    if file.name != CONFIG_FILE:
        return _config_in_gguf(file)
    if not file.is_file():
        raise UnreadableConfigError(f"model folder {folder} has no {CONFIG_FILE}; check the path in the manifest")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UnreadableConfigError(f"{file} is not a JSON object")
    return config


def _config_in_gguf(file: Path) -> Config:
    from transformers import AutoConfig  # part of every engine's installation

    try:
        config: Config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    except Exception as error:  # the reader raises whatever a broken file makes it stumble over
        raise UnreadableConfigError(f"{file} cannot be read: {error}") from None
    return {"dtype": "float32", **{name: value for name, value in config.items() if value is not None}}
