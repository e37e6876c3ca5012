"""Finds weights and hidden states that are not finite: one NaN in the KV cache spoils later requests, too.

A number may also become infinite when it is converted to the format that the engine computes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

COMPUTED = (torch.float32, torch.float16, torch.bfloat16)


def not_finite(weight: torch.Tensor) -> str:
    """Return what is wrong with the numbers, in words; empty if all are finite. It allocates no copy of the weight."""
    is_packed = weight.layout is not torch.strided  # for one kernel, in a form of its own
    if weight.dtype not in COMPUTED or weight.is_meta or is_packed or not weight.numel():
        return ""
    low, high = (float(bound) for bound in weight.detach().aminmax())  # NaN if any number is
    if low != low:
        return "NaN"
    if low == -torch.inf or high == torch.inf:
        return f"infinite numbers (in {str(weight.dtype).removeprefix('torch.')})"
    return ""


def refuse_not_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, which names the first weight that is not finite. weights: by name."""
    for name, weight in weights.items():
        numbers = not_finite(weight)
        if numbers:
            raise ValueError(f"its {name} has {numbers}: train, save or download it again")


def refuse_broken_target(model: nn.Module) -> None:
    """Raise ValueError if a loaded target cannot answer. Other parameters (scales, zero points) may be unused."""
    weights = {name: weight for name, weight in model.named_parameters() if name.endswith((".weight", ".bias"))}
    try:
        refuse_not_finite(weights)
    except ValueError as error:
        raise ValueError(f"the target cannot be served: {error}") from None


def first_rows(input_batch: Any) -> torch.Tensor:
    """(requests,): each request's first row of logits. It follows the last verified token, whatever was proposed after
    it; the other rows follow proposals."""
    rows: torch.Tensor = input_batch.cu_num_logits[: input_batch.num_reqs]
    return rows


def state_sums(hidden_states: torch.Tensor, input_batch: Any) -> torch.Tensor:
    """(requests,): sum of the state that each request's next token comes from; not finite if one of its numbers is not.

    hidden_states: (tokens, width).
    """
    rows = input_batch.logits_indices.index_select(0, first_rows(input_batch))
    return hidden_states.index_select(0, rows).sum(dim=1, dtype=torch.float32)


def overflows(largest_logits: torch.Tensor, first: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """(requests,): whether a logit is NaN or infinite in one of the rows that a request's tokens were sampled from.

    largest_logits: (rows,), the largest of each row. first: (requests,), see `first_rows`. sampled: (requests,), tokens
    of each request, one row for each; 0 in the midst of a prompt. Rows behind them follow proposals that were rejected.
    """
    broken = torch.nn.functional.pad((~largest_logits.isfinite()).cumsum(0), (1, 0))  # (rows + 1,), before each row
    return broken[first + sampled] > broken[first]


def broken_requests(names: Sequence[str], sums: torch.Tensor) -> list[str]:
    """Return the requests whose sum of `state_sums`, on the host, is not finite."""
    finite = sums.isfinite()
    return (
        [] if finite.all() else [name for name, is_finite in zip(names, finite.tolist(), strict=True) if not is_finite]
    )
