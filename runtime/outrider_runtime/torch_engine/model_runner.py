"""Runs a model over a step's tokens. Target, draft models and heads share what is here: places, masks and caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider_runtime.control.data.batch import Bools
from outrider_runtime.model_config import config_file, gguf_file
from outrider_runtime.torch_engine.architecture import Architecture, UnsupportedModelError, read_architecture
from outrider_runtime.torch_engine.decoder import Decoder, Hidden, Rotary, Span
from outrider_runtime.torch_engine.kv import KVCache
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.weights import read_weights


class Segment(NamedTuple):
    """n tokens of one request that a model runs over, and their places in its text."""

    request: str
    tokens: Sequence[int]
    position: int
    """Of the first, and of every other one that hangs on nothing."""
    hangs: Bools | None = None
    """(n, m): the ones among the last m tokens, these included, that each hangs on or is; it sees all before those m.
    None: it hangs on the ones before it."""

    def positions(self) -> list[int]:
        if self.hangs is None:
            return list(range(self.position, self.position + len(self.tokens)))
        depths: list[int] = self.hangs.sum(1).tolist()
        return [self.position + depth - 1 for depth in depths]

    def mask(self, before: int, device: torch.device) -> Tensor | None:
        """(n, places): who sees what; None: all see everything. before: places that were filled before these tokens."""
        n = len(self.tokens)
        if self.hangs is None:
            return torch.ones(n, before + n, dtype=torch.bool, device=device).tril(before) if n > 1 else None
        if self.hangs.all():
            return None
        places, m = before + n, self.hangs.shape[1]
        mask = torch.ones(n, places, dtype=torch.bool, device=device)
        mask[:, places - m :] = torch.from_numpy(self.hangs)
        return mask


class LayerInputs:
    """Turns segments into what layers take. The pool has made room for them before."""

    def __init__(self, folder: Path, shape: Architecture, cache: KVCache, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self._groups = shape.heads // shape.kv_heads
        self._rotary = _rotation(folder).to(device)
        self._numbers = torch.empty(0, dtype=torch.float32, device=device)
        """Only says of which type rotations are."""

    def tokens(self, segments: Sequence[Segment]) -> Tensor:
        """(T,)"""
        return torch.tensor([token for one in segments for token in one.tokens], device=self.device)

    def rotary(self, segments: Sequence[Segment], dtype: torch.dtype) -> Rotary:
        positions = [position for one in segments for position in one.positions()]
        cos, sin = self._rotary(self._numbers, torch.tensor([positions], device=self.device))  # (1, T, d)
        return Rotary(cos[0, :, None].to(dtype), sin[0, :, None].to(dtype))

    def spans(self, segments: Sequence[Segment], pool: KVPool, model: int) -> list[Span]:
        spans = list[Span]()
        for one in segments:
            kv = self.cache.with_room(one.request, pool.tokens(Holder(model, one.request)))
            mask = one.mask(kv.length, self.device)
            spans.append(Span(len(one.tokens), kv, None if mask is None else mask.repeat(self._groups, 1)))
        return spans


def _rotation(folder: Path) -> LlamaRotaryEmbedding:
    """Raises UnsupportedModelError."""
    try:
        return LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder, **gguf_file(folder)))
    except Exception as error:  # configurations are checked by whatever each field's reader raises
        raise UnsupportedModelError(f"{config_file(folder)}: rope_parameters cannot be used: {error}") from None


def count_in(spans: Sequence[Span]) -> None:
    """A pass over them is done: their tokens' places in the caches are filled."""
    for span in spans:
        span.kv.length += span.tokens


class CachedModel:
    """A decoder with its caches: the target, or a draft model."""

    def __init__(self, folder: Path, number: int, *, dtype: torch.dtype | None, device: torch.device) -> None:
        """number: its place among the models of the pool. dtype: None for that of the weights."""
        self.shape = read_architecture(folder)
        self.device = device
        self.dtype = dtype or getattr(torch, self.shape.dtype)
        weights = read_weights(folder, self.dtype, device)
        self.decoder = Decoder(self.shape, weights)
        self.weight_bytes = weights.taken_bytes + self.decoder.copied_bytes
        self.cache = KVCache(self.shape, self.dtype, device)
        self.number = number
        self._places = LayerInputs(folder, self.shape, self.cache, device)

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], pool: KVPool, between: Sequence[int] = ()) -> Hidden:
        """Every token's KV is written behind that of the tokens before it."""
        spans = self._places.spans(segments, pool, self.number)
        rotary = self._places.rotary(segments, self.dtype)
        hidden = self.decoder(self._places.tokens(segments), rotary, spans, between)
        count_in(spans)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps are timed by the host's clock
        return hidden
