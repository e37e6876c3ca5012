"""`vllm.lora.ops.torch_ops`: LoRA's two products, for batches in which some rows have no adapter.

vLLM gives such a row adapter -1, which indexes the weights from the end. So on a CPU a request without an adapter would
get the adapter in the last slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops


def without_unadapted_rows(operation: Callable[..., None]) -> Callable[..., None]:
    """Zero the inputs of rows without an adapter: the products are linear, so their outputs are zero."""

    @functools.wraps(operation)
    def masked(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, adapters: torch.Tensor, *rest: Any,
        **named: Any,
    ) -> None:  # fmt: skip
        operation(inputs.masked_fill((adapters < 0).unsqueeze(1), 0), weights, output, adapters, *rest, **named)

    return masked


OPERATIONS = {
    name: without_unadapted_rows(vars(lora_ops)[name]) for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
}
"""Operations that all others call. They begin with inputs (rows, width), weights, output and adapters (rows,)."""
