"""vLLM's second model runner on CPUs.

Between matrix multiplications the runner uses Triton kernels, and Triton has no compiler for CPUs. Functions in numba
and torch stand in for the kernels of a serving step. The other kernels, which are rarely used, are interpreted: that
takes a thousand times as long. There is one module here for each module of vLLM with such kernels; `replaced` lists
all stand-ins.

    os.environ.update(cpu.ENVIRONMENT)   # in every process, before vLLM is imported
    cpu.allow_second_runner()            # in a process that makes vLLM's config
    cpu.install()                        # in the worker, before its runner is imported
    cpu.compile_stand_ins(...)           # in the worker, once it has its KV cache
"""

from __future__ import annotations

from outrider_runtime.vllm_plugin.cpu.interpreter import ENVIRONMENT, allow_second_runner, interpret_kernels
from outrider_runtime.vllm_plugin.cpu.stand_in_warm_up import compile_stand_ins


def install() -> None:
    """Make the second runner work on this process's CPU. Idempotent."""
    interpret_kernels()
    from outrider_runtime.vllm_plugin.cpu import (
        linear_attention,
        lora_ops,
        replaced,
        zeroed_pages,
    )  # import vLLM's modules

    replaced.put_in_place()
    lora_ops.put_in_place()
    linear_attention.put_in_place()
    zeroed_pages.put_in_place()


__all__ = ["ENVIRONMENT", "allow_second_runner", "compile_stand_ins", "install"]
