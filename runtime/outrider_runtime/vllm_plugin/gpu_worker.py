"""Worker on a GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import gpu_worker

from outrider_runtime.vllm_plugin.cause import TellingWorker
from outrider_runtime.vllm_plugin.runner import PoolRunner
from outrider_runtime.vllm_plugin.versions import check_engine_version


class OutriderGPUWorker(TellingWorker, gpu_worker.Worker):  # type: ignore[misc]  # vLLM is untyped here
    def init_device(self) -> None:
        check_engine_version()
        super().init_device()

    def determine_available_memory(self) -> int:
        free_bytes: int = super().determine_available_memory()
        self.model_runner.leave_out_what_does_not_fit(free_bytes)
        return free_bytes

    def _make_model_runner(self) -> Any:
        return PoolRunner(self.vllm_config, self.device)
