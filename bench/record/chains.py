"""What a drafter proposes at every position of a text at once.

A causal model reads the text in one pass. Then each position goes on by itself: the next token of its chain attends to
the text up to that position and to the chain's tokens before it. A mask says so, and K passes over all positions
replace K passes at each position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from training.eagle3.head import Attention, Head

Visible = Callable[[Tensor, Tensor], Tensor]
"""(positions (M, 1), keys (1, N)) -> (M, N): which of the text's keys a position may see."""


class Chains(NamedTuple):
    """Proposed tokens and the drafter's confidences at M positions, both (M, K)."""

    tokens: Tensor
    confidence: Tensor
    """Log-odds of the token in the drafter's own distribution."""


def see_everything(positions: Tensor, keys: Tensor) -> Tensor:
    return keys <= positions


def see_answer(prompt: int) -> Visible:
    return lambda positions, keys: (keys >= prompt - 1) & (keys <= positions)


def see_without_gap(width: int) -> Visible:
    """Hide the `width` positions before each position: the drafter never read them."""
    return lambda positions, keys: ((keys < positions - width) | (keys == positions)) & (keys <= positions)


def see_sinks_and_window(sinks: int, window: int) -> Visible:
    return lambda positions, keys: ((keys < sinks) | (keys > positions - window)) & (keys <= positions)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best token and its log-odds, both (...). logits: (..., V)."""
    logs = logits.float().log_softmax(-1)
    best, token = logs.max(-1)
    return token, best - torch.log1p(-best.exp().clamp(max=1 - 1e-6))


@torch.inference_mode()
def propose_with_model(
    model: PreTrainedModel, tokens: Tensor, first: int, count: int, length: int, visible: Visible
) -> Chains:
    """Propose with a language model at positions first..first+count-1 of tokens (N,).

    visible: applies to the chains alone; the text is read with full attention, as the target's cache was written.
    """
    n, cache = len(tokens), DynamicCache()
    out = model(tokens[None], past_key_values=cache, use_cache=True)
    positions = torch.arange(first, first + count)
    keys = torch.arange(n)[None]
    mask = visible(positions[:, None], keys)  # (M, N)
    own = torch.eye(count, dtype=torch.bool)
    if visible is see_everything:
        token, sure = greedy(out.logits[0, positions])
        steps = 1
    else:  # the last token is processed again, over the visible tokens
        token, sure, steps = tokens[positions], None, 0
        mask = mask & (keys < positions[:, None])
    proposed, confidence = ([token], [sure]) if sure is not None else ([], [])
    while len(proposed) < length:
        mask = torch.cat([mask, own], 1)  # (M, N + s * M)
        bias = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
        out = model(
            token[None], past_key_values=cache, use_cache=True, attention_mask=bias[None, None],
            position_ids=(positions + steps)[None],
        )  # fmt: skip
        token, sure = greedy(out.logits[0])
        proposed.append(token)
        confidence.append(sure)
        steps += 1
    return Chains(torch.stack(proposed, 1), torch.stack(confidence, 1))


@torch.inference_mode()
def propose_with_head(
    head: Head, embed: nn.Module, tokens: Tensor, fused: Tensor, first: int, count: int, length: int, visible: Visible
) -> Chains:
    """Propose with an EAGLE-3 head at positions first..first+count-1; at position p it has read the token p + 1.

    tokens (N + 1,), fused (N, 3H): the target's states.
    """
    dtype = head.fc.weight.dtype
    state: Tensor = head.fc(fused[None].to(dtype))  # (1, N, H)
    n, chain = state.shape[1], list[tuple[Tensor, Tensor]]()
    keys, places = torch.arange(n), torch.arange(first, first + count)
    seen = visible(keys[:, None], keys[None])
    state = attending_layer(head, embed(tokens[None, 1 : n + 1]).to(dtype), state, keys, seen, chain)[:, places]
    chain = [chain[0]]
    proposed, confidence = [], []
    for step in range(length):
        token, sure = greedy(head.lm_head(head.norm(state))[0])
        token = head.vocabulary[token]
        proposed.append(token)
        confidence.append(sure)
        if step + 1 < length:
            state = attending_layer(head, embed(token[None]).to(dtype), state, places + 1 + step, seen[places], chain)
    return Chains(torch.stack(proposed, 1), torch.stack(confidence, 1))


def attending_layer(
    head: Head, token: Tensor, state: Tensor, places: Tensor, seen: Tensor, chain: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Run the head's layer. token, state (1, M, H); seen (M, N): visible keys of the text.

    chain: keys and values of the text, then of the chain's tokens.
    """
    layer = head.midlayer
    x = torch.cat([layer.input_layernorm(token), layer.hidden_norm(state)], -1)
    state = state + _attend(layer.self_attn, x, head.rotary(state, places[None]), seen, chain)
    out: Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
    return out


def _attend(
    attention: Attention, x: Tensor, rotary: tuple[Tensor, Tensor], seen: Tensor, chain: list[tuple[Tensor, Tensor]]
) -> Tensor:
    q, k, v = (
        project(x).view(*x.shape[:-1], -1, attention.head_dim).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *rotary)
    chain.append((k.repeat_interleave(attention.groups, 1), v.repeat_interleave(attention.groups, 1)))
    (text_k, text_v), own = chain[0], chain[1:]
    scores = [(q @ text_k.mT).masked_fill(~seen, -math.inf)]  # (1, heads, M, N)
    scores += [(q * key).sum(-1, keepdim=True) for key, _ in own]  # (1, heads, M, 1) each
    weights = (torch.cat(scores, -1).float() * attention.head_dim**-0.5).softmax(-1).to(q.dtype)
    mixed = weights[..., : seen.shape[1]] @ text_v
    for step, (_, value) in enumerate(own):
        mixed = mixed + weights[..., seen.shape[1] + step, None] * value
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return out
