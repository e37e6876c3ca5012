"""What takes the place of a Triton kernel: launched like it, with Python underneath."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba.core.dispatcher import Dispatcher

from outrider_runtime.vllm_plugin.cpu.arrays import view

GRID = "grid"


class KernelChangedError(RuntimeError):
    """vLLM's kernel does not take what its stand-in reads."""


class StandIn:
    """Launched as `kernel[grid](...)`, calls `function` with those of the kernel's arguments that it names.

    The kernel's parameters go by their own names without `_ptr`; `grid` is the launch's grid. A function that numba
    has compiled gets numpy views, any other the tensors themselves. Raises KernelChangedError when the kernel has no
    parameter of a name that `function` asks for.
    """

    def __init__(self, kernel: Any, function: Callable[..., Any]) -> None:
        self.kernel = kernel
        self.function = function
        self.__name__ = kernel.__name__
        parameters = inspect.signature(kernel.fn).parameters
        self._parameters = tuple(name.removesuffix("_ptr") for name in parameters)
        self._defaults = {
            name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty
        }
        self._wanted = _parameters_of(function)
        self._compiled = isinstance(function, Dispatcher)
        unknown = [name for name in self._wanted if name not in (*self._parameters, GRID)]
        if unknown:
            raise KernelChangedError(f"{kernel.__module__}.{self.__name__} has no parameter {', '.join(unknown)}")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            given = {**self._defaults, GRID: grid, **dict(zip(self._parameters, arguments, strict=False)), **named}
            values = [given[name] for name in self._wanted]
            self.function(*(map(view, values) if self._compiled else values))

        return launch


def _parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(function, "py_func", function)).parameters)
