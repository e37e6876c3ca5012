"""The process of the engine core, from its first call."""

from __future__ import annotations

from typing import Any

from outrider_runtime.vllm_plugin import patches
from outrider_runtime.vllm_plugin.cause import note_cause

_run_engine_core = patches.original(patches.ENGINE_CORE)


def run_engine_core(*arguments: Any, **named: Any) -> None:
    """Run vLLM's engine core, and note the exception that ends it.

    This must be a function of a module: the server's process passes it on by name.
    """
    with note_cause():
        _run_engine_core(*arguments, **named)


def install() -> None:
    """Replace vLLM's function; call it in the server's process, before it starts an engine."""
    patches.put(patches.ENGINE_CORE, staticmethod(run_engine_core))
