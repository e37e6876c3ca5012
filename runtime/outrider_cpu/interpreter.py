"""Triton's interpreter for vLLM's second model runner, on machines without a Triton compiler.

vLLM's CPU build finds no Triton backend for CPUs. It binds placeholders in `vllm.triton_utils`, and takes plain CPU
paths wherever it checks `HAS_TRITON`. The second runner has Triton kernels and no such paths. So the plain paths stay,
and modules imported later get the real Triton, which interprets (TRITON_INTERPRET).
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment of every process of the engine, before vLLM is imported."""
RUNNER = "vllm.v1.worker.gpu"
_CONFIG = "vllm.config.vllm"
_READER = "vllm.v1.worker.gpu_worker"
"""A module that asks on its own whether there is a Triton."""
_theirs: dict[tuple[Any, str], Any] = {}
"""What vLLM had in the places that `allow_second_runner` changes."""
_BOUND_FROM = {
    "triton": "triton",
    "tl": "triton.language",
    "gluon": "triton.experimental.gluon",
    "gl": "triton.experimental.gluon.language",
}


def allow_second_runner() -> None:
    """Let vLLM's config accept the second runner on a CPU, which it refuses without Triton.

    It also disables vLLM's own stand-ins for kernels of the first runner. Installing them inspects every imported
    module, and some modules raise then (llvmlite, Triton).
    """
    platform = type(_module("vllm.platforms").current_platform)
    _put(_module(_CONFIG), "HAS_TRITON", True)
    _put(platform, "register_triton_kernel_overrides", classmethod(lambda _platform: None))


def _put(owner: Any, name: str, ours: object) -> None:
    _theirs.setdefault((owner, name), vars(owner)[name])
    setattr(owner, name, ours)


def forbid_second_runner() -> None:
    """Undo `allow_second_runner`, so that vLLM's config chooses the runner as it would alone."""
    for (owner, name), original in _theirs.items():
        setattr(owner, name, original)
    _theirs.clear()


def interpret_kernels() -> None:
    """Give the second runner's modules, imported here first, Triton's interpreter.

    Harmless when done twice. Raises RuntimeError when it comes too late: Triton was imported without TRITON_INTERPRET,
    so that its own functions are compiled ones, or the runner was imported without Triton.
    """
    allow_second_runner()
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(language.sum, InterpretedFunction):
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1; set it before vLLM is imported")
    names = _module("vllm.triton_utils")
    if names.triton is sys.modules["triton"]:
        return
    if any(name.startswith(f"{RUNNER}.") for name in sys.modules):
        raise RuntimeError(f"{RUNNER} was imported before the interpreter was there; install it first")
    for name, source in _BOUND_FROM.items():
        setattr(names, name, _module(source))
    names.tldevice = SimpleNamespace(log1p=_log1p)
    names.aggregate = _module("triton.language.core")._aggregate
    language.debug_barrier = _no_barrier  # a kernel's threads run one after the other
    _module("vllm.v1.worker.cpu.shm")  # makes torch's streams and events harmless; vLLM wants it first
    _module(_READER).HAS_TRITON = True


def _log1p(value: Any) -> Any:
    """The one function of a GPU's own library that the second runner calls; the interpreter has none of them."""
    return _module("triton.language").log(value + 1.0)


def _no_barrier(*_arguments: Any, **_named: Any) -> None:
    pass


def _module(name: str) -> Any:
    return importlib.import_module(name)
