"""vLLM's own scheduler on a CPU: an engine in which the loop is not active."""

from __future__ import annotations

from typing import Any

from outrider_runtime.vllm_plugin import cpu
from vllm.v1.core.sched.scheduler import Scheduler


def stock_scheduler(*arguments: Any, **keywords: Any) -> Scheduler:
    cpu.allow_second_runner()  # vLLM checks its config once more in the engine's process
    return Scheduler(*arguments, **keywords)
