"""vLLM's second model runner on CPUs.

The runner's small work, between the matrix multiplications, is Triton kernels, and Triton compiles none for CPUs.
Numba and torch stand in for those of a serving step; what is left is interpreted, which takes a thousand times as long
and is for what is rare. One module here for each of vLLM's that has such kernels; `replaced` lists them all.

    os.environ.update(cpu.ENVIRONMENT)   # in every process, before vLLM is imported
    cpu.allow_second_runner()            # where a config is made
    cpu.install()                        # in the worker, before its runner is imported
    cpu.compile_stand_ins(...)           # there, when it has its KV cache
"""

from __future__ import annotations

from outrider_runtime.vllm_plugin.cpu.interpreter import ENVIRONMENT, allow_second_runner, interpret_kernels
from outrider_runtime.vllm_plugin.cpu.stand_in_warm_up import compile_stand_ins


def install() -> None:
    """Make the second runner work on this process's CPU; harmless when done twice."""
    interpret_kernels()
    from outrider_runtime.vllm_plugin.cpu import lora_ops, replaced  # import vLLM's modules

    replaced.put_in_place()
    lora_ops.put_in_place()


__all__ = ["ENVIRONMENT", "allow_second_runner", "compile_stand_ins", "install"]
