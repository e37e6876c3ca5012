"""What this machine's CPU can do, and what is compiled for it.

Read where Linux says it: LLVM would tell, too, but vLLM's workers do not start in a process that has loaded it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
COMMON = {"x86_64": "x86-64-v3", "aarch64": "generic"}
"""Machine -> the CPU that LLVM compiles for."""
V3_FLAGS = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
"""What x86-64-v3 has and older x86-64 CPUs lack."""
BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


def any_server(environ: Mapping[str, str]) -> dict[str, str]:
    """numba's variables for x86-64 CPUs with AVX2, or for any ARM one: what was compiled where an image was built runs
    where it is pulled. Empty where the user names a CPU or features, and on an older CPU, for which numba compiles."""
    name = COMMON.get(platform.machine())
    too_old = name == "x86-64-v3" and not cpu_flags() >= V3_FLAGS
    if name is None or too_old or environ.keys() & {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"}:
        return {}
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it. Without, 128 rows take eight times as long as in float32."""
    return bool(cpu_flags() & BFLOAT16_FLAGS)


def cpu_flags() -> frozenset[str]:
    """As the kernel names what the first CPU can do; empty where it does not say."""
    return frozenset((_said("flags") or _said("Features")).split())


def cpu_name() -> str:
    """The CPU's model name, as the kernel gives it; "cpu" where it gives none. It says where bfloat16 is slow: what is
    measured there in float32 is not true of others of that name."""
    return (_said("model name") or "cpu") + ("" if multiplies_bfloat16() else " without bfloat16")


def _said(field: str) -> str:
    """The first that is not empty, of all CPUs."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(filter(None, values), "")
