"""numba with types: what is hot is a plain loop, compiled once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache
from numba.extending import register_jitable

Function = TypeVar("Function", bound=Callable[..., object])


class Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Code on disk whose argument types another release has moved is a miss; numba raises."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except (ImportError, AttributeError):
            self.flush()
            return None


def compiled(function: Function) -> Function:
    """`function` as machine code, compiled at its first call with arguments of new types. The code is kept beside the
    source, or in NUMBA_CACHE_DIR where that is set (a read-only image)."""
    dispatcher = numba.njit(error_model="numpy")(function)
    if isinstance(dispatcher, numba.core.dispatcher.Dispatcher):  # it is a plain function under NUMBA_DISABLE_JIT
        dispatcher._cache = Cache(function)  # what `cache=True` does
    return cast(Function, dispatcher)


def compilable(function: Function) -> Function:
    """Plain Python where Python calls it, and part of the machine code where compiled code does: for a few sums that
    are not worth a call across."""
    return cast(Function, register_jitable(function))
