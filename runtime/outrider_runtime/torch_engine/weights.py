"""A model's tensors, from safetensors or GGUF; each is asked for once, by name and shape, and none may be left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider_runtime.model_config import gguf_file
from outrider_runtime.torch_engine.architecture import UnsupportedModelError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
RECOMPUTED = "rotary_emb.inv_freq"
"""Old checkpoints hold it; it follows from the configuration."""


class Weights:
    """Raises UnsupportedModelError, which names file and tensor, for whatever is missing or not as it should be."""

    def __init__(self, tensors: Mapping[str, Tensor], source: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(RECOMPUTED)}
        self._source, self._dtype, self._device = source, dtype, device
        self.taken_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise UnsupportedModelError(
                f"{self._source} has no tensor {name}; the file is not whole, or not this model's"
            )
        if tensor.shape != shape:
            raise UnsupportedModelError(
                f"{self._source}: the tensor {name} is {list(tensor.shape)}, and config.json asks for {list(shape)}"
            )
        taken = tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)
        self.taken_bytes += taken.nbytes
        return taken

    def drop(self, name: str) -> None:
        self._tensors.pop(name, None)

    def expect_none_left(self) -> None:
        if self._tensors:
            raise UnsupportedModelError(
                f"{self._source} holds {next(iter(self._tensors))}, which no model that the Torch backend serves has"
            )


def in_vocabulary(tokens: Tensor, vocabulary: int, folder: Path, name: str) -> Tensor:
    """`tokens`, which a drafter proposes. Raises UnsupportedModelError: the target has no row for any other."""
    beyond = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(beyond):
        raise UnsupportedModelError(
            f"{folder}: {name} names token {int(beyond[0])}, and the target has {vocabulary}; the drafter is another's"
        )
    return tokens


def read_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Weights:
    tensors: dict[str, Tensor] = {}
    gguf = gguf_file(folder)
    if gguf:
        tensors = _read_gguf(folder / gguf["gguf_file"])
    else:
        for file in _files(folder):
            tensors |= _read(file)
    return Weights(tensors, folder, dtype, device)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return [folder / WHOLE]
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{index} cannot be read: {error!r}") from None
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict):
        raise UnsupportedModelError(f"{index}: weight_map is missing, or no object")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UnsupportedModelError(f"{index}: weight_map names {name!r}, which is no file of this folder")
    return [folder / name for name in sorted(set(names.values()))]


def _read(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(f"{file} cannot be read, or is cut off: {error}") from None


def _read_gguf(file: Path) -> dict[str, Tensor]:
    """Unpacked by transformers, with its names."""
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # the reader raises whatever a broken file makes it stumble over
        raise UnsupportedModelError(f"{file} cannot be read, or is cut off: {error}") from None
    tensors: dict[str, Tensor] = model.state_dict()
    return tensors
