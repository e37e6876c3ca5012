"""The part of a worker that is the same on CPUs and GPUs."""

from __future__ import annotations

from typing import Any

from outrider_runtime.vllm_plugin.cause import note_cause
from outrider_runtime.vllm_plugin.versions import check_engine_version


class PoolWorker:
    """The first base class of a worker, before vLLM's.

    It notes an exception during its start. vLLM itself reports later ones to the engine core.
    """

    model_runner: Any

    def init_device(self) -> None:
        with note_cause():
            check_engine_version()
            super().init_device()  # type: ignore[misc]  # of vLLM's worker

    def load_model(self, **options: object) -> None:
        with note_cause():
            super().load_model(**options)  # type: ignore[misc]

    def determine_available_memory(self) -> int:
        free_bytes: int = super().determine_available_memory()  # type: ignore[misc]
        self.model_runner.leave_out_to_fit(free_bytes)
        return free_bytes
