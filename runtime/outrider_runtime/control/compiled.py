"""numba with types: what is hot is a plain loop, compiled once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
from numba.extending import register_jitable

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """`function` as machine code, compiled at its first call with arguments of new types. The code is kept beside the
    source, or in NUMBA_CACHE_DIR where that is set (a read-only image)."""
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


def compilable(function: Function) -> Function:
    """Plain Python where Python calls it, and part of the machine code where compiled code does: for a few sums that
    are not worth a call across."""
    return cast(Function, register_jitable(function))
