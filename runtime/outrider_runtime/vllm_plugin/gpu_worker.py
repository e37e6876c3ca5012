"""Worker on a GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import gpu_worker

from outrider_runtime.vllm_plugin.runner import PoolRunner
from outrider_runtime.vllm_plugin.worker import PoolWorker


class OutriderGPUWorker(PoolWorker, gpu_worker.Worker):  # type: ignore[misc]  # vLLM is untyped here
    def _make_model_runner(self) -> Any:
        return PoolRunner(self.vllm_config, self.device)
