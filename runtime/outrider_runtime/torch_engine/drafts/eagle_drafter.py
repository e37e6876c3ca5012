"""An EAGLE-3 head: one layer over the target's hidden states and the next token's embedding.

Its cache holds an entry for each token that it ran over; a step without it leaves some out, and it proposes over the
others. An entry knows its place in the text by its rotation, so entries need not follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider_runtime.drafters.eagle import LAYER_IDS
from outrider_runtime.torch_engine.architecture import Architecture, config_of, read_architecture
from outrider_runtime.torch_engine.decoder import Layer, Rotary, Span, read_layer
from outrider_runtime.torch_engine.drafting import RequestStep
from outrider_runtime.torch_engine.drafts.autoregressive import Autoregressive, last_of
from outrider_runtime.torch_engine.kv import KVCache
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.linear import Linear
from outrider_runtime.torch_engine.model_runner import CachedModel, LayerInputs, Segment, count_in
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row, likeliest_among
from outrider_runtime.torch_engine.weights import Weights, in_vocabulary, read_weights

FUSED = 3
"""Hidden states that a head reads."""


class EagleWeights:
    """The weights. Shapes: T tokens of a pass, H width, V' tokens that it may propose."""

    def __init__(self, folder: Path, target: CachedModel) -> None:
        config = config_of(folder)
        self.shape: Architecture = read_architecture(folder)
        weights = read_weights(folder, target.dtype, target.device)
        width = self.shape.width
        self.layers = fused_layers(config, target.shape.layers)
        self._fuse = Linear(weights.take("fc.weight", width, FUSED * target.shape.width)).packed()
        self._state_norm = weights.take("midlayer.hidden_norm.weight", width)
        self._layer: Layer = read_layer(weights, self.shape, "midlayer", 2 * width)
        self._norm = weights.take("norm.weight", width)
        proposable = config.get("draft_vocab_size") or self.shape.vocabulary
        self._output = Linear(weights.take("lm_head.weight", proposable, width)).packed()
        self._to_target = _vocabulary(weights, proposable, target, folder)
        self._embedding = target.decoder.embedding
        weights.expect_none_left()
        self.weight_bytes = weights.taken_bytes

    def fused(self, between: dict[int, Tensor], rows: Tensor) -> Tensor:
        """(T, H) of what the target handed out for `rows`."""
        return self._fuse(torch.cat([between[layer][rows] for layer in self.layers], -1))

    def __call__(self, tokens: Tensor, state: Tensor, rotary: Rotary, spans: Sequence[Span]) -> Tensor:
        """Tokens (T,) and the states before them (T, H) to the next states (T, H)."""
        normed = [
            self._layer.normed(self._embedding[tokens], self._layer.input_norm),
            self._layer.normed(state, self._state_norm),
        ]
        return self._layer.after_attention(state, self._layer.attention(torch.cat(normed, -1), rotary, spans, 0))

    def likeliest(self, state: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        """(rows, H) to the target's tokens that the head proposes for each."""
        logits = self._output(self._layer.normed(state, self._norm)).float()
        return likeliest_among(logits, self._to_target, len(self._embedding), rows, width)


def fused_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Of the target, before which its states are read; those that every trainer takes where the head says nothing."""
    own = config.get("eagle_config") or {}
    named = own.get(LAYER_IDS) or config.get(LAYER_IDS)
    return tuple(named) if named else (2, layers // 2, layers - 3)


def _vocabulary(weights: Weights, proposable: int, target: CachedModel, folder: Path) -> Tensor:
    """(V',): the target's token of each that the head proposes; a head of all of them may have no map."""
    weights.drop("t2d")
    own, size = torch.arange(proposable, device=target.device), target.shape.vocabulary
    if proposable == size and "d2t" not in weights:
        return own
    return in_vocabulary(own + weights.take("d2t", proposable).long(), size, folder, "d2t")


class EagleDrafter(Autoregressive):
    """It closes no hole: the states that it would read are gone."""

    def __init__(self, folder: Path, number: int, target: CachedModel, pool: KVPool) -> None:
        """number: its place among the models of the pool."""
        self.head = EagleWeights(folder, target)
        cache = KVCache(self.head.shape, target.dtype, target.device)
        super().__init__(number, cache, pool, self.head.weight_bytes)
        self.layers = self.head.layers
        self._places = LayerInputs(folder, self.head.shape, self.cache, target.device)
        self._dtype = target.dtype

    def _entries(self, one: RequestStep) -> int:
        return self.cache.length(one.request.name) + len(one.rows)

    def _read(self, ran: Sequence[RequestStep], between: dict[int, Tensor]) -> Tensor:
        segments = [
            Segment(one.request.name, one.request.tokens[one.start + 1 : one.end + 1], one.start) for one in ran
        ]
        rows = torch.tensor([row for one in ran for row in one.rows], device=self._places.device)
        return last_of(self._pass(segments, self.head.fused(between, rows)), segments)

    def _position(self, one: RequestStep) -> int:
        """An entry stands where the state is that it reads, one before its token."""
        return one.end

    def _pass(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        spans = self._places.spans(segments, self._pool, self.number)
        rotary = self._places.rotary(segments, self._dtype)
        states = self.head(self._places.tokens(segments), states, rotary, spans)
        count_in(spans)
        return states

    def _likeliest(self, states: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        return self.head.likeliest(states, rows, width)
