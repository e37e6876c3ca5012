"""`spec_decode.rejection_sampler`: the accepted proposals, and the token after them (Leviathan et al., 2023).

A greedy request's proposal stands where it is the target's likeliest token. Another's stands with probability
min(1, p/q); after a rejection the next token is drawn from max(p - q, 0), after none from p. A drafter that keeps no
logits proposes with q = 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

from outrider_cpu.arrays import compiled, view
from outrider_cpu.noise import uniform
from outrider_cpu.rows import bits_of, drawn, likeliest

Array = Any
Tensor = torch.Tensor
interpreted_rejection_sample = rejection_sampler_utils.rejection_sample
_F32 = np.float32
_NEVER_PROPOSED = -1
"""Stands for a placeholder without a proposal: it is rejected, and nothing is subtracted from p."""


@compiled
def gather_draft_sampled(
    draft_sampled: Array,  # (rows,): the token that each row of logits follows
    pos: Array,  # (rows,)
    input_ids: Array,  # (tokens,)
    positions: Array,  # (tokens,)
    logits_indices: Array,  # (rows,): each row's token
    expanded_idx_mapping: Array,  # (rows,)
    expanded_local_pos: Array,  # (rows,)
    prefill_len: Array,  # (most requests,)
) -> None:
    """`_gather_draft_sampled_kernel`: no proposal counts in a step that begins within the prompt."""
    for row in range(len(draft_sampled)):
        token, place = logits_indices[row], expanded_local_pos[row]
        pos[row] = positions[token]
        within = place > 0 and pos[row] - place < prefill_len[expanded_idx_mapping[row]]
        draft_sampled[row] = _NEVER_PROPOSED if within else input_ids[token]


@compiled
def flatten_sampled(flat_sampled: Array, sampled: Array, num_sampled: Array, cu_num_logits: Array) -> None:
    """`_flatten_sampled_kernel`: sampled (requests, k + 1) to flat_sampled (rows,)."""
    for place in range(len(num_sampled)):
        for i in range(num_sampled[place]):
            flat_sampled[cu_num_logits[place] + i] = sampled[place, i]


def rejection_sample(
    target_logits: Tensor,  # (rows, vocabulary), temperature applied
    draft_logits: Tensor | None,  # (most requests, k, vocabulary), before temperature
    draft_sampled: Tensor,  # (rows,): row i + 1 has the token that row i verifies
    cu_num_logits: Tensor,  # (requests + 1,)
    pos: Tensor,  # (rows,)
    idx_mapping: Tensor,  # (requests,)
    expanded_idx_mapping: Tensor,  # (rows,)
    expanded_local_pos: Tensor,  # (rows,)
    temperature: Tensor,  # (most requests,)
    seed: Tensor,  # (most requests,)
    num_speculative_steps: int,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Return tokens (requests, k + 1) int64, and the number of valid ones (requests,) int32.

    vLLM's own, interpreted, serves what is rare: made-up acceptance rates, float64, block or lossy verification,
    watermarks.
    """
    is_rare = use_fp64 or use_block_verification or bool(more.get("fly_window_size"))
    if is_rare or synthetic_conditional_rates is not None or contexts is not None:
        sampled, num_sampled = interpreted_rejection_sample(
            target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
            expanded_local_pos, temperature, seed, num_speculative_steps, synthetic_conditional_rates, use_fp64,
            use_block_verification, contexts, **more,
        )  # fmt: skip
        return sampled, num_sampled
    if draft_logits is not None:  # a target padded to a wider vocabulary has nothing there
        target_logits = target_logits[:, : draft_logits.shape[-1]].contiguous()
    sampled = torch.empty(len(idx_mapping), num_speculative_steps + 1, dtype=torch.int64)
    num_sampled = torch.empty(len(idx_mapping), dtype=torch.int32)
    step = [view(tensor) for tensor in (draft_sampled, cu_num_logits, idx_mapping, temperature)]
    outcome = view(sampled), view(num_sampled)
    if not _verify_greedy(bits_of(target_logits), *step, *outcome):
        return sampled, num_sampled
    target = _Target(target_logits, draft_sampled)
    draft = None
    if draft_logits is not None:
        rows = expanded_idx_mapping, expanded_local_pos.clamp(max=draft_logits.shape[1] - 1)
        draft = _Draft(draft_logits[..., : target_logits.shape[1]], rows, temperature, draft_sampled)
    log_q = np.zeros(len(draft_sampled), np.float32) if draft is None else view(draft.of_proposals)
    _accept(view(target.of_proposals), log_q, *step, view(seed), view(pos), *outcome)
    for index, request in enumerate(idx_mapping.tolist()):
        if temperature[request] != 0:
            accepted = int(num_sampled[index])
            row = int(cu_num_logits[index]) + accepted
            bonus = row == int(cu_num_logits[index + 1]) - 1
            rejected = _NEVER_PROPOSED if bonus else int(draft_sampled[row + 1])
            logits = _residual(target, draft, row, rejected)
            sampled[index, accepted] = drawn(view(logits), len(logits), int(seed[request]), int(pos[row]))
            num_sampled[index] = accepted + 1
    return sampled, num_sampled


@compiled
def _verify_greedy(
    bits: Array, draft_sampled: Array, first: Array, requests: Array, temperature: Array, sampled: Array, count: Array
) -> int:
    """Verify greedy requests; returns the number of the others, whose rows do not change."""
    others = 0
    for place in range(len(requests)):
        if temperature[requests[place]] != 0:
            others += 1
            continue
        last = first[place + 1] - 1
        for row in range(first[place], last + 1):
            token = likeliest(bits[row], bits.shape[1])
            sampled[place, row - first[place]] = token
            count[place] = row - first[place] + 1
            if row < last and draft_sampled[row + 1] != token:
                break
    return others


@compiled
def _accept(
    log_p: Array,
    log_q: Array,
    draft_sampled: Array,
    first: Array,
    requests: Array,
    temperature: Array,
    seeds: Array,
    positions: Array,
    sampled: Array,
    count: Array,
) -> None:
    """Verify requests that sample. log_p, log_q: (rows,), log-probabilities of the proposal after each row."""
    for place in range(len(requests)):
        request = requests[place]
        if temperature[request] == 0:
            continue
        count[place] = 0
        for row in range(first[place], first[place + 1] - 1):
            token = draft_sampled[row + 1]
            if token < 0 or not log_p[row] > _F32(math.log(uniform(seeds[request], positions[row]))) + log_q[row]:
                break
            sampled[place, count[place]] = token
            count[place] += 1


class _Target:
    """The target's distributions: logits minus their log-sum-exp."""

    def __init__(self, logits: Tensor, draft_sampled: Tensor) -> None:
        self.logits = logits  # (rows, vocabulary)
        self.normaliser = torch.logsumexp(logits.float(), -1)  # (rows,)
        proposals = _proposal_after_each(draft_sampled)
        self.of_proposals = logits.gather(1, proposals.unsqueeze(1)).squeeze(1).float() - self.normaliser


class _Draft:
    """The distributions that proposals were drawn from, by the row of target logits that verifies them."""

    def __init__(self, logits: Tensor, rows: tuple[Tensor, Tensor], temperature: Tensor, draft_sampled: Tensor) -> None:
        scale = temperature[rows[0]]
        self.logits = logits[rows].float() / torch.where(scale == 0, 1.0, scale).unsqueeze(1)  # (rows, vocabulary)
        self.normaliser = torch.logsumexp(self.logits, -1)
        proposals = _proposal_after_each(draft_sampled)
        self.of_proposals = self.logits.gather(1, proposals.unsqueeze(1)).squeeze(1) - self.normaliser


def _proposal_after_each(draft_sampled: Tensor) -> Tensor:
    return torch.roll(draft_sampled, -1).clamp_min(0).long()


def _residual(target: _Target, draft: _Draft | None, row: int, rejected: int) -> Tensor:
    """(vocabulary,) float32: logits from which the token after the accepted proposals is drawn."""
    logits = target.logits[row].float()
    if rejected < 0:
        return logits
    if draft is None:
        return logits.index_fill(0, torch.tensor([rejected]), -math.inf)
    log_p = logits - target.normaliser[row]
    ratio = torch.exp(draft.logits[row] - draft.normaliser[row] - log_p)
    return torch.where(ratio < 1, log_p + torch.log1p(-ratio), -math.inf)
