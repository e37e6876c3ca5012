"""A DSpark head of one layer. Its parameters are named and shaped as vLLM's qwen3_dspark loads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

BLOCK = 4
"""Tokens that a pass proposes: as many as an EAGLE-3 head is unrolled for here (`UNROLL`)."""
READ = 2
"""Layers of the target that it reads: the deepest of those that an EAGLE-3 head reads."""
MARKOV_RANK = 4
"""Small, since each unit takes two numbers for every token of the vocabulary."""
ROPE_THETA = 10_000.0


class Attention(nn.Module):
    """Attention of a block over the context's keys and its own, with the same projections."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, width = config.head_dim, config.hidden_size
        self.group = config.num_attention_heads // config.num_key_value_heads
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries)
        self.k_proj = nn.Linear(width, keys)
        self.v_proj = nn.Linear(width, keys)
        self.o_proj = nn.Linear(queries, width)
        self.q_norm, self.k_norm = (LlamaRMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, places: Tensor, context: Tensor, seen: Tensor) -> Tensor:
        """Attend from blocks x (B, A, BLOCK, H) at places (A, BLOCK) to context (B, N, H) at places 0 to N - 1.

        seen (B, A, N): the context that each block sees; it sees its own tokens in both directions.
        """
        q, k, v = (self._split_heads(project(x.flatten(1, 2))) for project in (self.q_proj, self.k_proj, self.v_proj))
        text_k, text_v = (self._split_heads(project(context)) for project in (self.k_proj, self.v_proj))
        q, k = (self._rotate(norm(part), places.flatten()) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        text_k = self._rotate(self.k_norm(text_k), torch.arange(context.shape[1], device=places.device))
        text = (self._group_heads(q) @ text_k.mT).view(*q.shape[:3], -1)  # (B, heads, A * BLOCK, N)
        text = text.masked_fill(~seen.repeat_interleave(BLOCK, 1)[:, None], -math.inf)
        q, k, v = (self._split_blocks(part) for part in (q, self._repeat_keys(k), self._repeat_keys(v)))
        own = (q @ k.mT).flatten(2, 3)  # (B, heads, A * BLOCK, BLOCK)
        weights = (torch.cat([text, own], -1).float() * self.head_dim**-0.5).softmax(-1).to(v.dtype)
        text, own = weights.split([context.shape[1], BLOCK], -1)
        mixed = (self._group_heads(text) @ text_v).view(*text.shape[:3], -1) + (self._split_blocks(own) @ v).flatten(
            2, 3
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out.view_as(x)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape (B, N, heads * D) to (B, heads, N, D)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _group_heads(self, x: Tensor) -> Tensor:
        """Reshape (B, heads, N, ...) to (B, key heads, group * N, ...): heads that share keys become rows."""
        return x.reshape(x.shape[0], x.shape[1] // self.group, -1, x.shape[-1])

    def _repeat_keys(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, 1)

    def _split_blocks(self, x: Tensor) -> Tensor:
        """Reshape (B, heads, A * BLOCK, ...) to (B, heads, A, BLOCK, ...)."""
        return x.reshape(*x.shape[:2], -1, BLOCK, x.shape[-1])

    def _rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotate x (B, heads, N, D) by the rotary angles of places (N,)."""
        cosine, sine = (part[None].to(x.dtype) for part in rotary(places, self.head_dim))
        turned: Tensor = apply_rotary_pos_emb(x, x, cosine, sine)[0]
        return turned


def rotary(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (N, size) for places (N,)."""
    angles = places[:, None] * ROPE_THETA ** (-torch.arange(0, size, 2, device=places.device) / size)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


class MLP(nn.Module):
    """Llama's MLP, narrow: it is most of the folder's size, and little of the time, which the output layer takes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, inner_size(config))

    def forward(self, x: Tensor, places: Tensor, context: Tensor, seen: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), places, context, seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def inner_size(config: LlamaConfig) -> int:
    half: int = config.hidden_size // 2
    return half


class MarkovHead(nn.Module):
    """The bias of each token's logit that depends on the token before."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, MARKOV_RANK)
        self.markov_w2 = nn.Linear(MARKOV_RANK, vocabulary, bias=False)


class BlockHead(nn.Module):
    """A block is the request's last token and BLOCK - 1 masks after it; each of its states proposes the next token.

    Embedding and output layer are the target's. `compared`: tokens that every training step compares, sorted.
    """

    compared: Tensor

    def __init__(self, config: LlamaConfig, mask_token: int, compared: Tensor) -> None:
        super().__init__()
        self.mask_token = mask_token
        self.fc = nn.Linear(READ * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm, self.norm = (LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList([Layer(config)])
        self.markov_head = MarkovHead(config.vocab_size)
        self.register_buffer("compared", compared, persistent=False)

    def forward(self, embed: nn.Module, last: Tensor, context: Tensor, unseen: Tensor) -> Tensor:
        """Return normed states (B, A, BLOCK, H) of the blocks after A successive places of a text.

        last (B, A): each block's first token. context (B, N, READ * H): the target's states; the first block's are all
        but the last A - 1 of them, each further block sees one more. unseen (B,): leading rows that are padding.
        """
        blocks, rows = last.shape[1], context.shape[1]
        masks = last.new_full((*last.shape, BLOCK - 1), self.mask_token)
        x = embed(torch.cat([last[..., None], masks], -1)).to(self.fc.weight.dtype)  # (B, A, BLOCK, H)
        first = rows - blocks + 1 + torch.arange(blocks, device=last.device)  # (A,): places of the first tokens
        keys = torch.arange(rows, device=last.device)
        seen = (keys < first[:, None]) & (keys >= unseen[:, None, None])  # (B, A, N)
        states = self.hidden_norm(self.fc(context.to(self.fc.weight.dtype)))
        for layer in self.layers:
            x = layer(x, first[:, None] + torch.arange(BLOCK, device=last.device), states, seen)
        out: Tensor = self.norm(x)
        return out

    def markov(self, before: Tensor) -> Tensor:
        """Return the biases (..., V) of all logits after tokens (...)."""
        addends: Tensor = self.markov_head.markov_w2(self.markov_head.markov_w1(before))
        return addends


def looks_back(size: int, distance: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Return biases (size,) of queries and keys whose product is largest `distance` tokens apart.

    pairs: how many rotary pairs they use, the fastest first.
    """
    key = torch.zeros(size)
    key[:pairs] = 1.0
    cosine, sine = rotary(torch.tensor([float(-distance)]), size)
    query = key * cosine[0] + key.roll(size // 2) * sine[0]
    return query, key
