"""`vllm.lora.ops.torch_ops`: LoRA's two products, where some rows have no adapter.

vLLM numbers these rows' adapter -1, which indexes its weights from behind: on a CPU a request without an adapter gets
the one in the last slot.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
"""All take (rows, width) inputs, weights, an output, and (rows,) numbers of adapters first; the others call these."""
MODULES = ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu")


def put_in_place() -> None:
    """In each module that has them by name. Harmless when done twice."""
    for name in MODULES:
        module = importlib.import_module(name)
        for operation in OPERATIONS:
            theirs = getattr(module, operation)
            if not hasattr(theirs, "__wrapped__"):
                setattr(module, operation, without_rows_of_nobody(theirs))


def without_rows_of_nobody(operation: Callable[..., None]) -> Callable[..., None]:
    """The products are linear: of a row of zeros nothing comes."""

    @functools.wraps(operation)
    def masked(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, adapters: torch.Tensor, *rest: Any,
        **named: Any,
    ) -> None:  # fmt: skip
        operation(inputs.masked_fill((adapters < 0).unsqueeze(1), 0), weights, output, adapters, *rest, **named)

    return masked
