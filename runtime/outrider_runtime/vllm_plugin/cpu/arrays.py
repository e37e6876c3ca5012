"""How stand-ins see tensors: numpy views for numba, and rows behind the pointers that Triton kernels are handed."""

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
    """A numpy array over a tensor's own memory (bfloat16 as its bits); any other value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    seen_as = _VIEWED_AS.get(value.dtype)
    return (value if seen_as is None else value.view(seen_as)).numpy()


def compiled(function: Callable[..., Any]) -> Any:
    """Numba's compiler with a cache on disk. Arguments are numpy views; None stays None."""
    return kept(njit(nogil=True)(function))


def inlined(function: Callable[..., Any]) -> Any:
    """A part of a compiled function."""
    return njit(inline="always")(function)


@intrinsic  # type: ignore[untyped-decorator]
def _as_pointer(_typing: Any, address: Any) -> Any:
    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), code


@inlined
def row_at(address: int, row: int, stride: int) -> npt.NDArray[np.int32]:
    """(stride,) int32: one row of the table that begins at `address`."""
    found: npt.NDArray[np.int32] = carray(_as_pointer(np.int64(address) + 4 * np.int64(row) * stride), stride, np.int32)
    return found
