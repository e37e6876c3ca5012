"""The decoder of Llama, SmolLM2, Qwen2 and Qwen3, over the tokens of many requests at once.

A step's tokens are concatenated, request after request; only attention separates requests.
Shapes: T tokens of the step, n tokens of one request, P tokens in a request's KV; H hidden size, q query heads, h key
heads, g = q / h, d head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider_runtime.torch_engine.architecture import Architecture
from outrider_runtime.torch_engine.kv import KV
from outrider_runtime.torch_engine.linear import Linear, linear, stack
from outrider_runtime.torch_engine.weights import Weights


class Span(NamedTuple):
    """One request's share of a step's tokens; the spans of a step follow each other."""

    tokens: int
    kv: KV
    mask: Tensor | None
    """(g * n, P + n): True where a token sees another; None: each sees all, as a single token does."""


class Rotary(NamedTuple):
    """The rotary position embedding of a step's tokens; (T, 1, d) each."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, (T, heads, d), by their positions."""
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cos + turned * self.sin


@dataclass(frozen=True, slots=True)
class Attention:
    shape: Architecture
    qkv: Linear
    out: Linear
    query_norm: Tensor | None
    """(d,): Qwen3 normalises each head; None for other families."""
    key_norm: Tensor | None

    def __call__(self, x: Tensor, rotary: Rotary, spans: Sequence[Span], layer: int) -> Tensor:
        """Write the tokens' KV and attend over it: (T, input width) -> (T, H)."""
        shape = self.shape
        heads = self.qkv(x).view(len(x), -1, shape.head_width)  # (T, q + 2 h, d)
        queries, keys, values = heads.tensor_split((shape.heads, shape.heads + shape.kv_heads), 1)
        queries = rotary.turn(self._normalise(queries, self.query_norm))
        keys = rotary.turn(self._normalise(keys, self.key_norm))
        sizes = [span.tokens for span in spans]
        queries_by_span, keys_by_span, values_by_span = (
            part.split_with_sizes(sizes) for part in (queries, keys, values)
        )
        mixed = [
            attend(span_queries, *span.kv.write(layer, span_keys, span_values), span.mask)  # (n, q * d)
            for span, span_queries, span_keys, span_values in zip(
                spans, queries_by_span, keys_by_span, values_by_span, strict=True
            )
        ]
        return self.out(torch.cat(mixed))

    def _normalise(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else functional.rms_norm(x, norm.shape, norm, self.shape.norm_epsilon)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with queries (n, q, d) over keys and values, (h, P + n, d) each; return (n, q * d).

    The query heads that share a key head become rows of one product, so that no key is copied.
    """
    n, q, d = queries.shape
    h = keys.shape[0]
    rows = queries.view(n, h, q // h, d).permute(1, 2, 0, 3).reshape(1, h, -1, d)  # (1, h, g * n, d)
    mixed = functional.scaled_dot_product_attention(rows, keys[None], values[None], mask)  # (1, h, g * n, d)
    return mixed.view(h, q // h, n, d).permute(2, 0, 1, 3).reshape(n, q * d)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer: attention, then a SwiGLU MLP, each with a residual connection."""

    input_norm: Tensor
    attention: Attention
    inner_norm: Tensor
    gate_and_up: Linear
    down: Linear
    epsilon: float

    def __call__(self, x: Tensor, rotary: Rotary, spans: Sequence[Span], number: int) -> Tensor:
        """Run the layer: (T, H) -> (T, H). number: its index in the KV cache."""
        return self.after_attention(x, self.attention(self.normalise(x, self.input_norm), rotary, spans, number))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output to the residual `x`, then run the MLP; all (T, H)."""
        x = x + attended
        gate, up = self.gate_and_up(self.normalise(x, self.inner_norm)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)

    def normalise(self, x: Tensor, norm: Tensor) -> Tensor:
        return functional.rms_norm(x, norm.shape, norm, self.epsilon)


def read_layer(weights: Weights, shape: Architecture, name: str, input_width: int) -> Layer:
    """Take one layer's tensors. input_width: width of the attention's input; 2 H in an EAGLE head, otherwise H."""
    attention = f"{name}.self_attn"
    wide = shape.heads * shape.head_width
    narrow = shape.kv_heads * shape.head_width
    sizes = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
    biased, mlp_biased = shape.has_input_biases, shape.has_mlp_biases
    norms = [
        weights.take(f"{attention}.{part}.weight", shape.head_width) if shape.has_head_norms else None
        for part in ("q_norm", "k_norm")
    ]
    return Layer(
        input_norm=weights.take(f"{name}.input_layernorm.weight", shape.width),
        attention=Attention(
            shape,
            stack(
                [
                    linear(weights, f"{attention}.{part}", size, input_width, has_bias=biased)
                    for part, size in sizes.items()
                ]
            ).pack(),
            linear(weights, f"{attention}.o_proj", shape.width, wide, has_bias=shape.has_output_bias).pack(),
            *norms,
        ),
        inner_norm=weights.take(f"{name}.post_attention_layernorm.weight", shape.width),
        gate_and_up=stack(
            [
                linear(weights, f"{name}.mlp.{part}_proj", shape.inner_width, shape.width, has_bias=mlp_biased)
                for part in ("gate", "up")
            ]
        ).pack(),
        down=linear(weights, f"{name}.mlp.down_proj", shape.width, shape.inner_width, has_bias=mlp_biased).pack(),
        epsilon=shape.norm_epsilon,
    )


class Hidden(NamedTuple):
    """Hidden states of one forward pass."""

    last: Tensor
    """(T, H): input of the output layer, after the final norm."""
    layer_inputs: dict[int, Tensor]
    """Layer -> its input, (T, H), for the drafting heads that read it."""


class Decoder:
    """A whole model: embedding, layers, final norm and output layer."""

    def __init__(self, shape: Architecture, weights: Weights) -> None:
        self.shape = shape
        self.embedding = weights.take("model.embed_tokens.weight", shape.vocabulary, shape.width)
        self.layers = [
            read_layer(weights, shape, f"model.layers.{number}", shape.width) for number in range(shape.layers)
        ]
        self.norm = weights.take("model.norm.weight", shape.width)
        if shape.is_tied:
            weights.drop("lm_head.weight")
        output = self.embedding if shape.is_tied else weights.take("lm_head.weight", shape.vocabulary, shape.width)
        self.output = Linear(output).pack()
        self.copied_bytes = output.nbytes if shape.is_tied and self.output.weight is not output else 0
        """Bytes of the output layer when it is a reordered copy of the embedding."""
        weights.expect_none_left()

    def __call__(self, tokens: Tensor, rotary: Rotary, spans: Sequence[Span], kept_layers: Collection[int]) -> Hidden:
        """Run all layers over the step's tokens, (T,). kept_layers: layers whose input is returned too."""
        x, kept = self.embedding[tokens], dict[int, Tensor]()
        for number, layer in enumerate(self.layers):
            if number in kept_layers:
                kept[number] = x
            x = layer(x, rotary, spans, number)
        if len(self.layers) in kept_layers:
            kept[len(self.layers)] = x
        return Hidden(self.normalise(x), kept)

    def normalise(self, x: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output: (T, H) -> (T, H)."""
        return functional.rms_norm(x, self.norm.shape, self.norm, self.shape.norm_epsilon)

    def logits(self, last: Tensor) -> Tensor:
        """Compute logits in float32: (rows, H) -> (rows, vocabulary)."""
        return self.output(last).float()
