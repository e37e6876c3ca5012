"""A replacement of a Triton kernel: launched like a kernel, implemented in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from numba.core.dispatcher import Dispatcher

from outrider_cpu.arrays import view

GRID = "grid"


class KernelChangedError(RuntimeError):
    """vLLM's kernel lacks a parameter that its stand-in reads."""


class StandIn:
    """Calls `function` when it is launched as `kernel[grid](...)`, with the kernel's arguments that `function` names.

    Parameters have the kernel's names without `_ptr`; `grid` is the grid of the launch. One with a default is for
    kernels of some versions of vLLM. A function compiled by numba gets numpy views, any other function the tensors.
    Raises KernelChangedError if `function` names a parameter without a default that the kernel lacks.
    """

    def __init__(self, kernel: Any, function: Callable[..., Any]) -> None:
        self.kernel = kernel
        self.function = function
        self.__name__ = kernel.__name__
        parameters = inspect.signature(kernel.fn).parameters
        self._parameters = tuple(name.removesuffix("_ptr") for name in parameters)
        own = inspect.signature(getattr(function, "py_func", function)).parameters
        self._defaults = _defaults(own) | _defaults(parameters)
        self._function_parameters = tuple(own)
        self._compiled = isinstance(function, Dispatcher)
        unknown = [name for name in own if name not in (*self._parameters, *_defaults(own), GRID)]
        if unknown:
            raise KernelChangedError(f"{kernel.__module__}.{self.__name__} has no parameter {', '.join(unknown)}")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            by_position = dict(zip(self._parameters, arguments, strict=False))
            by_name = {**self._defaults, GRID: grid, **by_position, **named}
            values = [by_name[name] for name in self._function_parameters]
            self.function(*(map(view, values) if self._compiled else values))

        return launch


def _defaults(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    return {
        name: parameter.default for name, parameter in parameters.items() if parameter.default is not parameter.empty
    }
