"""The process of the engine core, from its first call."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from outrider_runtime.vllm_plugin.cause import note_cause

_run_engine_core = EngineCoreProc.run_engine_core


def run_engine_core(*arguments: Any, **named: Any) -> None:
    """vLLM's; notes what ends it. A function of this module: the server's process hands it on by its name."""
    with note_cause():
        _run_engine_core(*arguments, **named)


def install() -> None:
    """In the server's process, before it starts an engine."""
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
