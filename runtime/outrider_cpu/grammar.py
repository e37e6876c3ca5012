"""`structured_outputs`: tokens that a request's grammar forbids."""

from __future__ import annotations

import math

import torch

from outrider_cpu.arrays import view

Tensor = torch.Tensor


def apply_grammar_bitmask(
    grid: tuple[int, int],  # (masks, blocks)
    logits: Tensor,  # (rows, vocabulary)
    logits_indices: Tensor,  # (masks,): place in the batch * MASK_STRIDE + place among the request's rows
    cu_num_logits: Tensor,
    bitmask: Tensor,  # (masks, vocabulary / 32) int32: a bit is set where a token is allowed
    vocab_size: int,
    MASK_STRIDE: int,  # noqa: N803
) -> None:
    """`_apply_grammar_bitmask_kernel`: logits of forbidden tokens become -inf."""
    bits = (bitmask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    forbidden = bits.view(len(bitmask), -1)[:, :vocab_size] == 0
    first = view(cu_num_logits)
    for mask, index in enumerate(view(logits_indices)[: grid[0]].tolist()):
        place, row = divmod(index, MASK_STRIDE)
        if row < first[place + 1] - first[place]:
            logits[first[place] + row, :vocab_size].masked_fill_(forbidden[mask], -math.inf)
