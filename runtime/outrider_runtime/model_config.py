"""Reads the configuration in a model's folder: config.json, or a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
Config = dict[str, Any]


class UnreadableConfigError(ValueError):
    """A model's configuration cannot be read; the message names the file."""


def gguf_file(folder: Path) -> dict[str, str]:
    """Return transformers' argument for a folder with one GGUF file and no config.json; empty for other folders."""
    files = list(folder.glob("*.gguf"))
    return {"gguf_file": files[0].name} if len(files) == 1 and not (folder / CONFIG_FILE).exists() else {}


def config_file(folder: Path) -> Path:
    """Return the file of the configuration, whether or not it exists."""
    return folder / gguf_file(folder).get("gguf_file", CONFIG_FILE)


def read_config(folder: Path) -> Config:
    """Read the model's configuration. Raises UnreadableConfigError."""
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
    except Exception as error:  # a broken file can make the reader raise any exception
        raise UnreadableConfigError(f"{file} cannot be read: {error}") from None
    return {"dtype": "float32", **{name: value for name, value in config.items() if value is not None}}
