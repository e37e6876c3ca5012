"""The decoder of Llama, SmolLM2, Qwen2 and Qwen3, over the tokens of many requests at once.

A step's tokens stand in one row after the other; only attention looks at whose they are. Shapes: T tokens of the step,
n of one request, H width, q heads of queries, h of keys, g = q / h, d numbers a head, P places in a request's KV.
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
from outrider_runtime.torch_engine.linear import Linear, linear, stacked
from outrider_runtime.torch_engine.weights import Weights


class Span(NamedTuple):
    """One request's tokens of a step, behind those of the spans before it."""

    tokens: int
    kv: KV
    mask: Tensor | None
    """(g * n, P + n): who sees what; None: everybody sees all, as a single token does."""


class Rotary(NamedTuple):
    """(T, 1, d) each."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """(T, heads, d)."""
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cos + turned * self.sin


@dataclass(frozen=True, slots=True)
class Attention:
    shape: Architecture
    qkv: Linear
    out: Linear
    query_norm: Tensor | None
    """(d,): Qwen3 normalises each head."""
    key_norm: Tensor | None

    def __call__(self, x: Tensor, rotary: Rotary, spans: Sequence[Span], layer: int) -> Tensor:
        """(T, any width) to (T, H)."""
        shape = self.shape
        heads = self.qkv(x).view(len(x), -1, shape.head_width)  # (T, q + 2 h, d)
        queries, keys, values = heads.tensor_split((shape.heads, shape.heads + shape.kv_heads), 1)
        queries = rotary.turn(self._normed(queries, self.query_norm))
        keys = rotary.turn(self._normed(keys, self.key_norm))
        sizes = [span.tokens for span in spans]
        of_queries, of_keys, of_values = (part.split_with_sizes(sizes) for part in (queries, keys, values))
        mixed = [
            attend(own, *span.kv.write(layer, key, value), span.mask)
            for span, own, key, value in zip(spans, of_queries, of_keys, of_values, strict=True)
        ]
        return self.out(torch.cat(mixed))

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else functional.rms_norm(x, norm.shape, norm, self.shape.norm_epsilon)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """(n, q, d) over (h, P + n, d) each, to (n, q * d): heads that share keys are rows of queries, so that no key is
    copied."""
    n, q, d = queries.shape
    h = keys.shape[0]
    rows = queries.view(n, h, q // h, d).permute(1, 2, 0, 3).reshape(1, h, -1, d)
    mixed = functional.scaled_dot_product_attention(rows, keys[None], values[None], mask)  # (1, h, g * n, d)
    return mixed.view(h, q // h, n, d).permute(2, 0, 1, 3).reshape(n, q * d)


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    attention: Attention
    inner_norm: Tensor
    gate_and_up: Linear
    down: Linear
    epsilon: float

    def __call__(self, x: Tensor, rotary: Rotary, spans: Sequence[Span], number: int) -> Tensor:
        """(T, H) to (T, H)."""
        return self.after_attention(x, self.attention(self.normed(x, self.input_norm), rotary, spans, number))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        gate, up = self.gate_and_up(self.normed(x, self.inner_norm)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)

    def normed(self, x: Tensor, norm: Tensor) -> Tensor:
        return functional.rms_norm(x, norm.shape, norm, self.epsilon)


def read_layer(weights: Weights, shape: Architecture, name: str, input_width: int) -> Layer:
    """input_width: of what attention reads; twice H in an EAGLE head."""
    own, wide, narrow = f"{name}.self_attn", shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    sizes = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
    biased, mlp_biased = shape.has_input_biases, shape.has_mlp_biases
    norms = [
        weights.take(f"{own}.{part}.weight", shape.head_width) if shape.has_head_norms else None
        for part in ("q_norm", "k_norm")
    ]
    return Layer(
        input_norm=weights.take(f"{name}.input_layernorm.weight", shape.width),
        attention=Attention(
            shape,
            stacked(
                [linear(weights, f"{own}.{part}", size, input_width, has_bias=biased) for part, size in sizes.items()]
            ).packed(),
            linear(weights, f"{own}.o_proj", shape.width, wide, has_bias=shape.has_output_bias).packed(),
            *norms,
        ),
        inner_norm=weights.take(f"{name}.post_attention_layernorm.weight", shape.width),
        gate_and_up=stacked(
            [
                linear(weights, f"{name}.mlp.{part}_proj", shape.inner_width, shape.width, has_bias=mlp_biased)
                for part in ("gate", "up")
            ]
        ).packed(),
        down=linear(weights, f"{name}.mlp.down_proj", shape.width, shape.inner_width, has_bias=mlp_biased).packed(),
        epsilon=shape.norm_epsilon,
    )


class Hidden(NamedTuple):
    last: Tensor
    """(T, H), normalised: what the output layer reads."""
    between: dict[int, Tensor]
    """Layer -> (T, H) before it, for heads that read them."""


class Decoder:
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
        self.output = Linear(output).packed()
        self.copied_bytes = output.nbytes if shape.is_tied and self.output.weight is not output else 0
        """Of an embedding that is kept in a second order too, as the output layer."""
        weights.expect_none_left()

    def __call__(self, tokens: Tensor, rotary: Rotary, spans: Sequence[Span], between: Collection[int]) -> Hidden:
        """tokens: (T,). between: layers whose input is kept."""
        x, kept = self.embedding[tokens], dict[int, Tensor]()
        for number, layer in enumerate(self.layers):
            if number in between:
                kept[number] = x
            x = layer(x, rotary, spans, number)
        if len(self.layers) in between:
            kept[len(self.layers)] = x
        return Hidden(self.normed(x), kept)

    def normed(self, x: Tensor) -> Tensor:
        """(T, H) behind the last layer to what the output layer reads."""
        return functional.rms_norm(x, self.norm.shape, self.norm, self.shape.norm_epsilon)

    def logits(self, last: Tensor) -> Tensor:
        """(rows, H) to (rows, vocabulary), float32."""
        return self.output(last).float()
