"""Runs a model over a step's tokens. Target, draft models and EAGLE heads share its positions, masks and KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider_runtime.control.batch import Bools
from outrider_runtime.model_config import config_file, gguf_file
from outrider_runtime.torch_engine.architecture import Architecture, UnsupportedModelError, read_architecture
from outrider_runtime.torch_engine.decoder import Decoder, Hidden, Rotary, Span
from outrider_runtime.torch_engine.kv import KVCache
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.weights import read_weights


class Segment(NamedTuple):
    """n tokens of one request that a model runs over; a chain, or nodes of a tree."""

    request: str
    tokens: Sequence[int]
    position: int
    """Position of the first token, and of every other token without an ancestor among the last m."""
    visible: Bools | None = None
    """(n, m): attention mask over the last m tokens, these n included: True for a token's ancestors and itself. Each
    token sees everything before those m. None: a chain, each token sees all before it."""

    def positions(self) -> list[int]:
        """(n,): each token's position in the text; siblings of a tree share one."""
        if self.visible is None:
            return list(range(self.position, self.position + len(self.tokens)))
        depths: list[int] = self.visible.sum(1).tolist()
        return [self.position + depth - 1 for depth in depths]

    def mask(self, cached: int, device: torch.device) -> Tensor | None:
        """(n, cached + n): the attention mask; None: all see everything. cached: tokens whose KV precedes these."""
        n = len(self.tokens)
        if self.visible is None:
            return torch.ones(n, cached + n, dtype=torch.bool, device=device).tril(cached) if n > 1 else None
        if self.visible.all():
            return None
        m = self.visible.shape[1]
        mask = torch.ones(n, cached + n, dtype=torch.bool, device=device)
        mask[:, cached + n - m :] = torch.from_numpy(self.visible)
        return mask


class LayerInputs:
    """Turns segments into the inputs of layers: tokens, rotations, and spans with KV and masks."""

    def __init__(self, folder: Path, shape: Architecture, cache: KVCache, device: torch.device) -> None:
        """folder: the model's, for its rotary embedding. cache: where its KV goes."""
        self.cache = cache
        self.device = device
        self._groups = shape.heads // shape.kv_heads
        self._rotary = _rotation(folder).to(device)
        self._rotation_dtype = torch.empty(0, dtype=torch.float32, device=device)
        """Empty: `LlamaRotaryEmbedding` reads nothing but its type and device."""

    def tokens(self, segments: Sequence[Segment]) -> Tensor:
        """Concatenate the segments' tokens, (T,)."""
        return torch.tensor([token for segment in segments for token in segment.tokens], device=self.device)

    def rotary(self, segments: Sequence[Segment], dtype: torch.dtype) -> Rotary:
        """Compute the rotations of the segments' tokens, (T, 1, d) each."""
        positions = [position for segment in segments for position in segment.positions()]
        cos, sin = self._rotary(self._rotation_dtype, torch.tensor([positions], device=self.device))  # (1, T, d)
        return Rotary(cos[0, :, None].to(dtype), sin[0, :, None].to(dtype))

    def spans(self, segments: Sequence[Segment], pool: KVPool, model: int) -> list[Span]:
        """Give each segment its KV buffer and mask. The pool has granted the room before. model: its pool number."""
        spans = list[Span]()
        for segment in segments:
            kv = self.cache.with_room(segment.request, pool.tokens(Holder(model, segment.request)))
            mask = segment.mask(kv.length, self.device)
            spans.append(Span(len(segment.tokens), kv, None if mask is None else mask.repeat(self._groups, 1)))
        return spans


def _rotation(folder: Path) -> LlamaRotaryEmbedding:
    """Build the model's rotary embedding. Raises UnsupportedModelError."""
    try:
        return LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder, **gguf_file(folder)))
    except Exception as error:  # transformers raises a different class for each wrong field
        raise UnsupportedModelError(f"{config_file(folder)}: rope_parameters cannot be used: {error}") from None


def count_as_cached(spans: Sequence[Span]) -> None:
    """Note, after a pass over `spans`, that the KV of their tokens is valid."""
    for span in spans:
        span.kv.length += span.tokens


class CachedModel:
    """A decoder with its caches: the target, or a draft model."""

    def __init__(self, folder: Path, number: int, *, dtype: torch.dtype | None, device: torch.device) -> None:
        """number: the model's number in the KV pool. dtype: None for the type in which the weights are stored."""
        self.shape = read_architecture(folder)
        self.device = device
        self.dtype = dtype or getattr(torch, self.shape.dtype)
        weights = read_weights(folder, self.dtype, device)
        self.decoder = Decoder(self.shape, weights)
        self.weight_bytes = weights.taken_bytes + self.decoder.copied_bytes
        self.cache = KVCache(self.shape, self.dtype, device)
        self.number = number
        self._inputs = LayerInputs(folder, self.shape, self.cache, device)

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], pool: KVPool, kept_layers: Sequence[int] = ()) -> Hidden:
        """Run over the segments' tokens and append their KV. kept_layers: layers whose input is returned too."""
        spans = self._inputs.spans(segments, pool, self.number)
        rotary = self._inputs.rotary(segments, self.dtype)
        hidden = self.decoder(self._inputs.tokens(segments), rotary, spans, kept_layers)
        count_as_cached(spans)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the host's clock times steps
        return hidden
