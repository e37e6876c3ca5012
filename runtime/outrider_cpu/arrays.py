"""Tensors as arguments of stand-ins: numpy views for numba, and rows behind the pointers that Triton kernels get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from outrider_runtime.control.compiled import kept

_VIEWED_AS = {torch.bfloat16: torch.int16, torch.uint64: torch.int64}
"""numpy has no bfloat16, and numba turns a sum of uint64 and int64 into a float."""


def view(value: Any) -> Any:
    """Return a numpy array over a tensor's own memory (bfloat16 as its bits); return other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    seen_as = _VIEWED_AS.get(value.dtype)
    return (value if seen_as is None else value.view(seen_as)).numpy()


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function with numba, with a cache on disk. Its arguments are numpy views; None stays None."""
    return kept(njit(nogil=True)(function))


def inlined(function: Callable[..., Any]) -> Any:
    """Mark a function as an inlined part of compiled functions."""
    return njit(inline="always")(function)


@intrinsic  # type: ignore[untyped-decorator]
def _as_pointer(_typing: Any, address: Any) -> Any:
    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), code


@inlined
def row_at(address: int, row: int, stride: int) -> npt.NDArray[np.int32]:
    """(stride,) int32: one row of the table that begins at `address`."""
    return carray(_as_pointer(np.int64(address) + 4 * np.int64(row) * stride), stride, np.int32)  # type: ignore[no-any-return]
