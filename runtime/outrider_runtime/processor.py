"""Capabilities of this machine's CPU, and the CPU for which numba compiles.

They are read from `/proc/cpuinfo`. LLVM knows them, too, but vLLM's workers do not start in a process that loaded LLVM.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
PORTABLE_CPUS = {"x86_64": "x86-64-v3", "aarch64": "generic"}
"""Machine -> LLVM's name of the CPU for which an image's code is compiled."""
V3_FLAGS = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
"""Kernel flags of instructions that x86-64-v3 has and older x86-64 CPUs lack."""
BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Kernel flags of instructions that multiply bfloat16."""


def portable_cpu_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return numba's variables for code that runs on any server: on x86-64 CPUs with AVX2, or on any ARM CPU.

    So the code compiled into an image runs wherever the image is pulled. The result is empty if the user sets a CPU or
    features, and on an older CPU, for which numba then compiles.
    """
    name = PORTABLE_CPUS.get(platform.machine())
    is_too_old = name == "x86-64-v3" and not cpu_flags() >= V3_FLAGS
    if name is None or is_too_old or environ.keys() & {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"}:
        return {}
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}


def multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions. Without them, 128 rows take eight times as long as in float32."""
    return bool(cpu_flags() & BFLOAT16_FLAGS)


def cpu_flags() -> frozenset[str]:
    """Return the kernel's names of the first CPU's capabilities; empty if the kernel lists none."""
    return frozenset((_cpu_info("flags") or _cpu_info("Features")).split())


def cpu_name() -> str:
    """Return the CPU's model name; "cpu" if the kernel has none. It notes if bfloat16 is missing.

    Such a CPU computes in float32, so its step times do not apply to other CPUs of the same name.
    """
    return (_cpu_info("model name") or "cpu") + ("" if multiplies_bfloat16() else " without bfloat16")


def _cpu_info(field: str) -> str:
    """Return the field of the first CPU that has it; empty if none does."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(filter(None, values), "")
