"""`sample.gumbel`, `sample.min_p`: the next token of each row of logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.v1.worker.gpu.sample import gumbel

from outrider_cpu.arrays import compiled, view
from outrider_cpu.noise import DRAFT_SALT
from outrider_cpu.rows import bits_of, drawn, likeliest

Array = Any
Tensor = torch.Tensor
interpreted_gumbel_sample = gumbel.gumbel_sample


def apply_temperature(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    """`_temperature_kernel`: divide logits (rows, vocabulary) by each row's temperature; greedy rows do not change."""
    by_row = temperature[expanded_idx_mapping.long()]
    logits.div_(torch.where(by_row == 0, 1.0, by_row).unsqueeze(1))


def apply_min_p(logits: Tensor, expanded_idx_mapping: Tensor, min_p: Tensor) -> None:
    """`_min_p_kernel`: drop tokens less likely than `min_p` times the likeliest."""
    share = min_p[expanded_idx_mapping.long()]
    rows = torch.nonzero(share).view(-1)
    selected = logits[rows]
    lower_bound = selected.max(-1, keepdim=True).values + share[rows].log().unsqueeze(1)
    logits[rows] = selected.masked_fill(selected < lower_bound, -math.inf)


def gumbel_sample(
    logits: Tensor,  # (rows, vocabulary)
    expanded_idx_mapping: Tensor,  # (rows,): each row's request; negative: no request
    temperature: Tensor,  # (most requests,)
    seed: Tensor,  # (most requests,)
    pos: Tensor,  # (rows,)
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: Tensor | None = None,
    logits_cache_col: Tensor | None = None,
    use_fp64: bool = False,
    logits_cache_source: Tensor | None = None,
) -> Tensor:
    """(rows,) int64: greedy rows get the likeliest token, the others one drawn with their request's seed.

    vLLM's own, interpreted, serves float64, and drafts whose logits are kept for verification; the pool has no such.
    """
    if use_fp64 or logits_cache is not None:
        return _interpreted(
            logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting,
            logits_cache, logits_cache_col, use_fp64, logits_cache_source,
        )  # fmt: skip
    logits = logits.contiguous()
    requests = view(expanded_idx_mapping)
    sampled = torch.empty(len(logits), dtype=torch.int64)
    drawn_rows = _likeliest_rows(bits_of(logits), requests, view(temperature), view(sampled))
    if drawn_rows:
        salt = DRAFT_SALT if is_drafting else 0
        _draw_rows(
            view(logits.float()), requests, view(temperature), apply_temperature, view(seed), view(pos), salt,
            view(sampled),
        )  # fmt: skip
    return sampled


def _interpreted(*arguments: Any) -> Tensor:
    sampled: Tensor = interpreted_gumbel_sample(*arguments)
    return sampled


@compiled
def _likeliest_rows(bits: Array, requests: Array, temperature: Array, sampled: Array) -> int:
    """How many rows are not greedy: theirs are left."""
    others = 0
    for row in range(len(bits)):
        if requests[row] >= 0 and temperature[requests[row]] != 0:
            others += 1
        else:
            sampled[row] = likeliest(bits[row], bits.shape[1])
    return others


@compiled
def _draw_rows(
    logits: Array,
    requests: Array,
    temperature: Array,
    apply_temperature: bool,
    seeds: Array,
    positions: Array,
    salt: int,
    sampled: Array,
) -> None:
    for row in range(len(logits)):
        request = requests[row]
        if request < 0 or temperature[request] == 0:
            continue
        scaled = logits[row] / temperature[request] if apply_temperature else logits[row]
        sampled[row] = drawn(scaled, logits.shape[1], seeds[request], positions[row] + salt)
