"""An EAGLE-3 head: one layer over the target's hidden states and the embeddings of the next tokens.

Its KV cache has an entry for each token that it ran over. In steps in which it does not run it misses tokens, and later
attends to the entries it has. An entry's rotation holds its position in the text, so entries need not be consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider_runtime.drafters.eagle import LAYER_IDS
from outrider_runtime.torch_engine.architecture import Architecture, read_architecture, read_unchecked_config
from outrider_runtime.torch_engine.decoder import Layer, Rotary, Span, read_layer
from outrider_runtime.torch_engine.drafting import RequestStep
from outrider_runtime.torch_engine.drafts.autoregressive import Autoregressive, select_last
from outrider_runtime.torch_engine.kv import KVCache
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.linear import Linear
from outrider_runtime.torch_engine.model_runner import CachedModel, LayerInputs, Segment, count_as_cached
from outrider_runtime.torch_engine.token_sampling import Likeliest, Row, likeliest_among
from outrider_runtime.torch_engine.weights import Weights, in_vocabulary, read_weights

FUSED = 3
"""Layers of the target whose input a head reads."""


class EagleWeights:
    """The head's tensors and forward pass. Shapes: T tokens of a pass, H hidden size, V' tokens that it may propose."""

    def __init__(self, folder: Path, target: CachedModel) -> None:
        config = read_unchecked_config(folder)
        self.shape: Architecture = read_architecture(folder)
        weights = read_weights(folder, target.dtype, target.device)
        width = self.shape.width
        self.layers = fused_layers(config, target.shape.layers)
        self._fuse = Linear(weights.take("fc.weight", width, FUSED * target.shape.width)).pack()
        self._state_norm = weights.take("midlayer.hidden_norm.weight", width)
        self._layer: Layer = read_layer(weights, self.shape, "midlayer", 2 * width)
        self._norm = weights.take("norm.weight", width)
        proposable = config.get("draft_vocab_size") or self.shape.vocabulary
        self._output = Linear(weights.take("lm_head.weight", proposable, width)).pack()
        self._to_target = _vocabulary(weights, proposable, target, folder)
        self._embedding = target.decoder.embedding
        weights.expect_none_left()
        self.weight_bytes = weights.taken_bytes

    def fuse(self, layer_inputs: dict[int, Tensor], rows: Tensor) -> Tensor:
        """Fuse the target's hidden states of these rows: FUSED times (T, H) -> (T, H)."""
        return self._fuse(torch.cat([layer_inputs[layer][rows] for layer in self.layers], -1))

    def __call__(self, tokens: Tensor, state: Tensor, rotary: Rotary, spans: Sequence[Span]) -> Tensor:
        """Compute the states after `tokens`, (T,), from the states before them, (T, H): the result is (T, H)."""
        normed = [
            self._layer.normalise(self._embedding[tokens], self._layer.input_norm),
            self._layer.normalise(state, self._state_norm),
        ]
        return self._layer.after_attention(state, self._layer.attention(torch.cat(normed, -1), rotary, spans, 0))

    def likeliest(self, state: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        """Rank the target's tokens that may follow each state, (R, H)."""
        logits = self._output(self._layer.normalise(state, self._norm)).float()
        return likeliest_among(logits, self._to_target, len(self._embedding), rows, width)


def fused_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """List the target's layers whose input the head reads. Without a field that names them, use EAGLE-3's default.

    layers: how many the target has.
    """
    eagle_config = config.get("eagle_config") or {}
    layer_ids = eagle_config.get(LAYER_IDS) or config.get(LAYER_IDS)
    return tuple(layer_ids) if layer_ids else (2, layers // 2, layers - 3)


def _vocabulary(weights: Weights, proposable: int, target: CachedModel, folder: Path) -> Tensor:
    """(V',): the target's number of each token of the head. A head with the whole vocabulary needs no map."""
    weights.drop("t2d")
    head_tokens = torch.arange(proposable, device=target.device)
    size = target.shape.vocabulary
    if proposable == size and "d2t" not in weights:
        return head_tokens
    return in_vocabulary(head_tokens + weights.take("d2t", proposable).long(), size, folder, "d2t")


class EagleDrafter(Autoregressive):
    """Proposes with an EAGLE-3 head. It never catches up: the target's hidden states of past steps are gone."""

    def __init__(self, folder: Path, number: int, target: CachedModel, pool: KVPool) -> None:
        """number: the drafter's number in the KV pool."""
        self.weights = EagleWeights(folder, target)
        cache = KVCache(self.weights.shape, target.dtype, target.device)
        super().__init__(number, cache, pool, self.weights.weight_bytes)
        self.layers = self.weights.layers
        self._inputs = LayerInputs(folder, self.weights.shape, self.cache, target.device)
        self._dtype = target.dtype

    def _entries(self, request_step: RequestStep) -> int:
        return self.cache.length(request_step.request.name) + len(request_step.rows)

    def _read(self, request_steps: Sequence[RequestStep], layer_inputs: dict[int, Tensor]) -> Tensor:
        segments = [
            Segment(request.name, request.tokens[start + 1 : start + len(rows) + 1], start)
            for request, _, start, rows in request_steps
        ]
        rows = torch.tensor([row for step in request_steps for row in step.rows], device=self._inputs.device)  # (T,)
        return select_last(self._pass(segments, self.weights.fuse(layer_inputs, rows)), segments)

    def _position(self, request_step: RequestStep) -> int:
        """An entry has the position of the hidden state that it reads, which is one before its token's."""
        return request_step.end

    def _pass(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        spans = self._inputs.spans(segments, self._pool, self.number)
        rotary = self._inputs.rotary(segments, self._dtype)
        states = self.weights(self._inputs.tokens(segments), states, rotary, spans)
        count_as_cached(spans)
        return states

    def _likeliest(self, states: Tensor, rows: Sequence[Row], width: int) -> Likeliest:
        return self.weights.likeliest(states, rows, width)
