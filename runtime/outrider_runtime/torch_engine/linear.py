"""Linear layers. On a CPU the weight matrix is stored in the memory layout that oneDNN multiplies in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider_runtime.torch_engine.weights import Weights

PACKED_FOR_ROWS = 16
"""Rows that the layout is made for: oneDNN's layout depends on them, and this one is good from one row to hundreds."""


class Linear(NamedTuple):
    """y = x W^T + b."""

    weight: Tensor
    """(outputs, inputs)"""
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) -> (rows, outputs)."""
        if self.weight.is_mkldnn:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return functional.linear(x, self.weight, self.bias)

    def pack(self) -> Linear:
        """Convert to oneDNN's layout on a CPU; converting at each product would double its time at 16 rows."""
        if not _is_packable(self.weight):
            return self
        return Linear(torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_FOR_ROWS), self.bias)

    def rows(self, numbers: Tensor) -> Tensor:
        """Select rows of the matrix: (len(numbers), inputs)."""
        return (self.weight.to_dense() if self.weight.is_mkldnn else self.weight)[numbers]


def _is_packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def linear(weights: Weights, name: str, outputs: int, inputs: int, *, has_bias: bool) -> Linear:
    """Take the tensors of one linear layer."""
    bias = weights.take(f"{name}.bias", outputs) if has_bias else None
    return Linear(weights.take(f"{name}.weight", outputs, inputs), bias)


def stack(parts: Sequence[Linear]) -> Linear:
    """Join layers with the same input into one product. Either all have a bias or none has."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
