"""vLLM's own scheduler on a CPU: an engine in which the loop is not active."""

from __future__ import annotations

from typing import Any

import outrider_cpu
from vllm.v1.core.sched.scheduler import Scheduler


def stock_scheduler(*arguments: Any, **keywords: Any) -> Scheduler:
    outrider_cpu.allow_second_runner()  # vLLM checks its config once more in the engine's process
    return Scheduler(*arguments, **keywords)
