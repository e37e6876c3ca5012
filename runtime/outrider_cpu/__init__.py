"""vLLM's second model runner on CPUs.

Between matrix multiplications the runner uses Triton kernels, and Triton has no compiler for CPUs. Functions in numba
and torch stand in for the kernels of a serving step. The other kernels, which are rarely used, are interpreted: that
takes a thousand times as long. There is one module here for each module of vLLM with such kernels; `replaced` lists
all stand-ins. Of Outrider it uses the numba decorator alone, and machines with a GPU do not need it.

    os.environ.update(outrider_cpu.ENVIRONMENT)  # in every process, before vLLM is imported
    outrider_cpu.allow_second_runner()           # in a process that makes vLLM's config
    outrider_cpu.install()                       # in the worker, before its runner is imported
    outrider_cpu.compile_stand_ins(...)          # in the worker, once it has its KV cache
"""

from __future__ import annotations

from outrider_cpu.interpreter import ENVIRONMENT, allow_second_runner, forbid_second_runner, interpret_kernels
from outrider_cpu.stand_in_warm_up import compile_stand_ins


def install() -> None:
    """Make the second runner work on this process's CPU. Idempotent."""
    interpret_kernels()
    from outrider_cpu.replaced import put_in_place  # imports vLLM's modules

    put_in_place()


__all__ = ["ENVIRONMENT", "allow_second_runner", "compile_stand_ins", "forbid_second_runner", "install"]
