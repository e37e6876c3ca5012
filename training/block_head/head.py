"""A DSpark head of one layer. Its parameters are named and shaped as vLLM's qwen3_dspark loads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

BLOCK = 4
"""Tokens that its pass proposes: as many as EAGLE-3 heads are unrolled for here."""
READ = 2
"""Layers of the target that it reads, the deepest of those that an EAGLE-3 head reads."""
MARKOV_RANK = 4
"""Small, as each unit takes two numbers of every token of the vocabulary; the layer takes most of the folder's 5 MB."""
ROPE_THETA = 10_000.0


class Attention(nn.Module):
    """A block's queries over the context's keys and the block's own, which are projected alike."""

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
        """Blocks x (B, A, BLOCK, H) at places (A, BLOCK) over context (B, N, H) at places 0 to N - 1; to x's shape.

        seen (B, A, N): each block sees so much of the context, and its own tokens both ways.
        """
        q, k, v = (self._heads(project(x.flatten(1, 2))) for project in (self.q_proj, self.k_proj, self.v_proj))
        text_k, text_v = (self._heads(project(context)) for project in (self.k_proj, self.v_proj))
        q, k = (self._turned(norm(part), places.flatten()) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        text_k = self._turned(self.k_norm(text_k), torch.arange(context.shape[1], device=places.device))
        text = (self._grouped(q) @ text_k.mT).view(*q.shape[:3], -1)  # (B, heads, A * BLOCK, N)
        text = text.masked_fill(~seen.repeat_interleave(BLOCK, 1)[:, None], -math.inf)
        q, k, v = (self._blocks(part) for part in (q, self._repeated(k), self._repeated(v)))
        own = (q @ k.mT).flatten(2, 3)  # (B, heads, A * BLOCK, BLOCK)
        weights = (torch.cat([text, own], -1).float() * self.head_dim**-0.5).softmax(-1).to(v.dtype)
        text, own = weights.split([context.shape[1], BLOCK], -1)
        mixed = (self._grouped(text) @ text_v).view(*text.shape[:3], -1) + (self._blocks(own) @ v).flatten(2, 3)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out.view_as(x)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, heads * D) to (B, heads, N, D)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _grouped(self, x: Tensor) -> Tensor:
        """(B, heads, N, ...) to (B, key heads, group * N, ...): heads that share keys are taken for rows."""
        return x.reshape(x.shape[0], x.shape[1] // self.group, -1, x.shape[-1])

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, 1)

    def _blocks(self, x: Tensor) -> Tensor:
        """(B, heads, A * BLOCK, ...) to (B, heads, A, BLOCK, ...)."""
        return x.reshape(*x.shape[:2], -1, BLOCK, x.shape[-1])

    def _turned(self, x: Tensor, places: Tensor) -> Tensor:
        """x (B, heads, N, D) by rotary angles of places (N,)."""
        cosine, sine = (part[None].to(x.dtype) for part in rotary(places, self.head_dim))
        turned: Tensor = apply_rotary_pos_emb(x, x, cosine, sine)[0]
        return turned


def rotary(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (N, size) for places (N,)."""
    angles = places[:, None] * ROPE_THETA ** (-torch.arange(0, size, 2, device=places.device) / size)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


class MLP(nn.Module):
    """Llama's, narrow: the head's time goes into the target's output layer, its folder's size into the rest."""

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
    """What the token before adds to each token's logit."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, MARKOV_RANK)
        self.markov_w2 = nn.Linear(MARKOV_RANK, vocabulary, bias=False)


class BlockHead(nn.Module):
    """A block is the request's last token and BLOCK - 1 masks behind it; each of its states proposes the next token.

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
        """Normed states (B, A, BLOCK, H) of the blocks behind A successive places of a text.

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
        """Addends to all logits (..., V) behind tokens (...)."""
        addends: Tensor = self.markov_head.markov_w2(self.markov_head.markov_w1(before))
        return addends


def looks_back(size: int, distance: int, pairs: int) -> tuple[Tensor, Tensor]:
    """A query's and a key's bias (size,) that meet best so many tokens apart, over the fastest rotary pairs."""
    key = torch.zeros(size)
    key[:pairs] = 1.0
    cosine, sine = rotary(torch.tensor([float(-distance)]), size)
    query = key * cosine[0] + key.roll(size // 2) * sine[0]
    return query, key
