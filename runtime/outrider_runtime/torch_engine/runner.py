"""Runs a model over a step's tokens. Target, draft models and heads share what is here: places, masks and caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider_runtime.torch_engine.architecture import Architecture, gguf_file, read_architecture
from outrider_runtime.torch_engine.decoder import Decoder, Hidden, Rotary, Span, causal_mask
from outrider_runtime.torch_engine.kv import Cache
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.weights import read_weights


class Segment(NamedTuple):
    """Tokens of one request that a model runs over, and their places in its text."""

    request: str
    tokens: Sequence[int]
    position: int
    """Of the first."""


class Places:
    """Turns segments into what layers take. The pool has made room for them before."""

    def __init__(self, folder: Path, shape: Architecture, cache: Cache, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self._groups = shape.heads // shape.kv_heads
        self._rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder, **gguf_file(folder))).to(device)
        self._numbers = torch.empty(0, dtype=torch.float32, device=device)
        """Only says of which type rotations are."""

    def tokens(self, segments: Sequence[Segment]) -> Tensor:
        """(T,)"""
        return torch.tensor([token for one in segments for token in one.tokens], device=self.device)

    def rotary(self, segments: Sequence[Segment], dtype: torch.dtype) -> Rotary:
        positions = [one.position + place for one in segments for place in range(len(one.tokens))]
        cos, sin = self._rotary(self._numbers, torch.tensor([positions], device=self.device))  # (1, T, d)
        return Rotary(cos[0, :, None].to(dtype), sin[0, :, None].to(dtype))

    def spans(self, segments: Sequence[Segment], pool: KVPool, model: int) -> list[Span]:
        spans, start = list[Span](), 0
        for one in segments:
            kv = self.cache.with_room(one.request, pool.tokens(Holder(model, one.request)))
            n = len(one.tokens)
            spans.append(Span(start, start + n, kv, causal_mask(kv.length, n, self._groups, self.device)))
            start += n
        return spans


class Model:
    """A decoder with its caches: the target, or a draft model."""

    def __init__(self, folder: Path, number: int, *, dtype: torch.dtype | None, device: torch.device) -> None:
        """number: its place among the models of the pool. dtype: None for that of the weights."""
        self.shape = read_architecture(folder)
        self.device = device
        self.dtype = dtype or getattr(torch, self.shape.dtype)
        weights = read_weights(folder, self.dtype, device)
        self.decoder = Decoder(self.shape, weights)
        self.weight_bytes = weights.taken_bytes
        self.cache = Cache(self.shape, self.dtype, device)
        self.number = number
        self._places = Places(folder, self.shape, self.cache, device)

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], pool: KVPool, between: Sequence[int] = ()) -> Hidden:
        """Every token's KV is written behind that of the tokens before it."""
        spans = self._places.spans(segments, pool, self.number)
        rotary = self._places.rotary(segments, self.dtype)
        hidden = self.decoder(self._places.tokens(segments), rotary, spans, between)
        for span in spans:
            span.kv.length += span.end - span.start
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps are timed by the host's clock
        return hidden
