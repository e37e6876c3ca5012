"""The EAGLE-3 head. Its parameters are named and shaped as vLLM's llama_eagle3 loads them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


class Attention(nn.Module):
    """Llama's attention with an input of twice the width: [token, state]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, width = config.head_dim, 2 * config.hidden_size
        self.groups = config.num_attention_heads // config.num_key_value_heads
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from x (B, N, 2H), to (B, N, H). chain: keys and values of the steps before; this step's are added.

        Each position goes on by itself: it sees the first step's keys up to its own, and its own of later steps.
        """
        q, k, v = (self._split_heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        chain.append((k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)))
        (text_k, text_v), own = chain[0], chain[1:]
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ text_k.mT).masked_fill(future, -math.inf)]  # (B, heads, N, N)
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in own]  # (B, heads, N, 1) each
        weights = (torch.cat(scores, -1).float() * self.head_dim**-0.5).softmax(-1).to(q.dtype)
        mixed = weights[..., : q.shape[2]] @ text_v
        for step, (_, value) in enumerate(own):
            mixed = mixed + weights[..., q.shape[2] + step, None] * value
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape (B, N, heads * D) to (B, heads, N, D)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class MidLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)

    def forward(
        self, token: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return states (B, N, H) for embedded tokens and states (B, N, H)."""
        x = torch.cat([self.input_layernorm(token), self.hidden_norm(state)], -1)
        state = state + self.self_attn(x, rotary, chain)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class Head(nn.Module):
    """An EAGLE-3 head. `vocabulary`: sorted target tokens that it may propose."""

    vocabulary: Tensor

    def __init__(self, config: LlamaConfig, vocabulary: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(vocabulary), bias=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def unroll(self, embed: nn.Module, tokens: Tensor, fused: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield the normed states (B, N, H) of each step (the paper's training-time test).

        Step s at position p reads the token p + 1 + s and proposes the next. fused (B, N, 3H): the target's states.
        tokens (B, at least N + steps): the text.
        """
        state: Tensor = self.fc(fused.to(self.fc.weight.dtype))
        chain: list[tuple[Tensor, Tensor]] = []
        n = state.shape[1]
        for step in range(steps):
            places = torch.arange(step, step + n, device=state.device)[None]
            token = embed(tokens[:, 1 + step : 1 + step + n]).to(state.dtype)
            state = self.midlayer(token, state, self.rotary(state, places), chain)
            yield self.norm(state)
