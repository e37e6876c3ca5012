"""Reads a model's tensors from safetensors or GGUF. Each is taken once, by name and shape; none may be left over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider_runtime.finite_weights import not_finite
from outrider_runtime.model_config import gguf_file
from outrider_runtime.torch_engine.architecture import UnsupportedModelError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
RECOMPUTED = "rotary_emb.inv_freq"
"""Suffix of a tensor in old checkpoints that is computed from the configuration instead."""


class Weights:
    """The tensors of one model, on a device. Errors are UnsupportedModelError and name file and tensor."""

    def __init__(self, tensors: Mapping[str, Tensor], source: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(RECOMPUTED)}
        self._source, self._dtype, self._device = source, dtype, device
        self.taken_bytes = 0
        """Bytes of all tensors that were taken."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Remove and return a tensor, converted and on the device.

        Raises when it is missing, has another shape, or holds numbers that are not finite.
        """
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise UnsupportedModelError(
                f"{self._source} has no tensor {name}; the file is incomplete or belongs to another model"
            )
        if tensor.shape != shape:
            raise UnsupportedModelError(
                f"{self._source}: the tensor {name} has shape {list(tensor.shape)}; config.json implies {list(shape)}"
            )
        taken = tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)
        numbers = not_finite(taken)
        if numbers:
            raise UnsupportedModelError(f"{self._source}: the tensor {name} has {numbers}: train or save it again")
        self.taken_bytes += taken.nbytes
        return taken

    def drop(self, name: str) -> None:
        """Ignore a tensor that is not needed, if there is one."""
        self._tensors.pop(name, None)

    def expect_none_left(self) -> None:
        """Raise if the file holds a tensor that the model has no use for: it is then another architecture's."""
        if self._tensors:
            raise UnsupportedModelError(
                f"{self._source} has a tensor {next(iter(self._tensors))}, which no model of the Torch backend uses"
            )


def in_vocabulary(tokens: Tensor, vocabulary: int, folder: Path, name: str) -> Tensor:
    """Return `tokens`, which a drafter proposes, if all are in the target's vocabulary; else UnsupportedModelError."""
    beyond = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(beyond):
        raise UnsupportedModelError(
            f"{folder}: {name} names token {int(beyond[0])}, and the target has {vocabulary} tokens: "
            "the drafter belongs to another model"
        )
    return tokens


def read_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read all tensors of a model's folder. Raises UnsupportedModelError."""
    tensors: dict[str, Tensor] = {}
    gguf = gguf_file(folder)
    if gguf:
        tensors = _read_gguf(folder / gguf["gguf_file"])
    else:
        for file in _files(folder):
            tensors |= _read(file)
    return Weights(tensors, folder, dtype, device)


def _files(folder: Path) -> list[Path]:
    """List the safetensors files of a model: those of its index, or the single one."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / WHOLE]
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{index} cannot be read: {error!r}") from None
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict):
        raise UnsupportedModelError(f"{index}: weight_map is missing or not an object")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UnsupportedModelError(f"{index}: weight_map names {name!r}, which is not a file of this folder")
    return [folder / name for name in sorted(set(names.values()))]


def _read(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is not a mapping
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(f"{file} cannot be read or is cut off: {error}") from None


def _read_gguf(file: Path) -> dict[str, Tensor]:
    """Let transformers unpack a GGUF file; the tensors then have transformers' names."""
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # transformers raises a different class for each kind of broken file
        raise UnsupportedModelError(f"{file} cannot be read or is cut off: {error}") from None
    tensors: dict[str, Tensor] = model.state_dict()
    return tensors
