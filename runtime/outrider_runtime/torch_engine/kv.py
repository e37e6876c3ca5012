"""The KV cache of one model: for each request one contiguous buffer for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.torch_engine.architecture import Architecture


@dataclass(slots=True, eq=False)
class KV:
    """One request's keys and values in one model. Shapes: L layers, h key heads, C tokens of capacity, d head size."""

    buffer: Tensor
    """(2, L, h, C, d): keys, then values."""
    length: int = 0
    """Tokens whose KV is valid. What the buffer holds after them is ignored, so a rejection only lowers this."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the KV of n tokens, (n, h, d) each; return all keys and values, (h, length + n, d) each.

        `length` stays as it is: every layer of a pass appends at the same place.
        """
        end = self.length + keys.shape[0]
        self.buffer[0, layer, :, self.length : end] = keys.transpose(0, 1)
        self.buffer[1, layer, :, self.length : end] = values.transpose(0, 1)
        return self.buffer[0, layer, :, :end], self.buffer[1, layer, :, :end]

    def keep(self, start: int, places: Sequence[int]) -> None:
        """Keep the first `start` tokens and, of those after them, the ones at `places`, counted from `start`."""
        if list(places) != list(range(len(places))):
            moved = self.buffer[:, :, :, [start + place for place in places]]
            self.buffer[:, :, :, start : start + len(places)] = moved
        self.length = start + len(places)


class KVCache:
    """The KV of every request in one model. `KVPool` decides how large each buffer may be."""

    def __init__(self, shape: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.bytes_per_token = shape.kv_bytes_per_token(dtype.itemsize)
        self._shape = (2, shape.layers, shape.kv_heads)
        self._head_width = shape.head_width
        self._dtype, self._device = dtype, device
        self._requests: dict[str, KV] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def __getitem__(self, request: str) -> KV:
        return self._requests[request]

    def length(self, request: str) -> int:
        """Tokens of the request whose KV is valid; 0 when it has none."""
        kv = self._requests.get(request)
        return 0 if kv is None else kv.length

    def with_room(self, request: str, tokens: int) -> KV:
        """Return the request's KV in a buffer for exactly `tokens`, copying it when the size changes."""
        kv = self._requests.setdefault(request, KV(self._empty(0)))
        if kv.buffer.shape[3] != tokens:
            moved = self._empty(tokens)
            moved[:, :, :, : kv.length] = kv.buffer[:, :, :, : kv.length]
            kv.buffer = moved
        return kv

    def forget(self, request: str) -> None:
        self._requests.pop(request, None)

    def _empty(self, tokens: int) -> Tensor:
        return torch.empty((*self._shape, tokens, self._head_width), dtype=self._dtype, device=self._device)
