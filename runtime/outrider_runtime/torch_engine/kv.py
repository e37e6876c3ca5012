"""Keys and values of one request in one model: contiguous, one buffer for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_runtime.torch_engine.architecture import Architecture


@dataclass(slots=True, eq=False)
class KV:
    """Shapes: L layers, h heads of keys, C places, d numbers a head."""

    buffer: Tensor
    """(2, L, h, C, d): keys, then values."""
    length: int = 0
    """Places that are filled. What lies behind them counts for nobody, so that a rejection is only a length."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put (n, h, d) each behind the filled places; all keys and values up to theirs, (h, length + n, d) each."""
        end = self.length + keys.shape[0]
        self.buffer[0, layer, :, self.length : end] = keys.transpose(0, 1)
        self.buffer[1, layer, :, self.length : end] = values.transpose(0, 1)
        return self.buffer[0, layer, :, :end], self.buffer[1, layer, :, :end]

    def keep(self, start: int, places: Sequence[int]) -> None:
        """Of what lies behind the first `start` places, these move down, counted from there; nothing else counts."""
        if list(places) != list(range(len(places))):
            moved = self.buffer[:, :, :, [start + place for place in places]]
            self.buffer[:, :, :, start : start + len(places)] = moved
        self.length = start + len(places)


class KVCache:
    """The KV of every request in one model."""

    def __init__(self, shape: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.bytes_per_token = shape.kv_bytes_per_token(dtype.itemsize)
        self._shape = (2, shape.layers, shape.kv_heads)
        self._head_width = shape.head_width
        self._dtype, self._device = dtype, device
        self._of: dict[str, KV] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._of

    def __getitem__(self, request: str) -> KV:
        return self._of[request]

    def length(self, request: str) -> int:
        kv = self._of.get(request)
        return 0 if kv is None else kv.length

    def with_room(self, request: str, tokens: int) -> KV:
        """The request's KV, in a buffer for exactly `tokens`; moved where it had one of another size."""
        kv = self._of.setdefault(request, KV(self._empty(0)))
        if kv.buffer.shape[3] != tokens:
            moved = self._empty(tokens)
            moved[:, :, :, : kv.length] = kv.buffer[:, :, :, : kv.length]
            kv.buffer = moved
        return kv

    def forget(self, request: str) -> None:
        self._of.pop(request, None)

    def _empty(self, tokens: int) -> Tensor:
        return torch.empty((*self._shape, tokens, self._head_width), dtype=self._dtype, device=self._device)
