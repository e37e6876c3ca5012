"""Products with a weight matrix, which a CPU holds in the order in which oneDNN multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider_runtime.torch_engine.weights import Weights

PACKED_FOR_ROWS = 16
"""oneDNN's order of a matrix depends on the rows that it expects; this one serves one row to hundreds."""


class Linear(NamedTuple):
    weight: Tensor
    """(outputs, inputs)"""
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return functional.linear(x, self.weight, self.bias)

    def packed(self) -> Linear:
        """In oneDNN's order on a CPU: a product that had to put the matrix so would take twice as long at 16 rows."""
        if not _is_packable(self.weight):
            return self
        return Linear(torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_FOR_ROWS), self.bias)

    def rows(self, numbers: Tensor) -> Tensor:
        """(len(numbers), inputs) of the matrix."""
        return (self.weight.to_dense() if self.weight.is_mkldnn else self.weight)[numbers]


def _is_packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def linear(weights: Weights, name: str, outputs: int, inputs: int, *, has_bias: bool) -> Linear:
    bias = weights.take(f"{name}.bias", outputs) if has_bias else None
    return Linear(weights.take(f"{name}.weight", outputs, inputs), bias)


def stacked(parts: Sequence[Linear]) -> Linear:
    """One product in place of several; all have a bias, or none."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
