"""Worker and model runners on a GPU. Not run on the build machine: tested by configuration only.

vLLM's second runner hosts EAGLE alone; prompt lookup, draft models and mixed pools run in the first (`launch`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner

from outrider_runtime.vllm_plugin.messages import attached_order
from outrider_runtime.vllm_plugin.runner import DraftOrders
from outrider_runtime.vllm_plugin.versions import check_engine_version

PADDING = -1


class OutriderGPURunner(DraftOrders):
    """vLLM's first runner."""


class OutriderSecondRunner(SecondRunner):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's second runner: its speculator is told to stay idle in steps that need no draft."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.speculator is not None:
            self.speculator.propose = self._when_ordered(self.speculator.propose)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        order = attached_order(scheduler_output)
        self._draft_runs = order is None or order.run_neural  # None: vLLM's own dummy step
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _when_ordered(self, propose: Any) -> Any:
        def propose_or_pad(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if getattr(self, "_draft_runs", True) or kwargs.get("dummy_run", False):
                proposals: torch.Tensor = propose(input_batch, *args, **kwargs)
                return proposals
            shape = (input_batch.num_reqs, self.num_speculative_steps)
            return torch.full(shape, PADDING, dtype=torch.int64, device=self.device)

        return propose_or_pad


class OutriderGPUWorker(gpu_worker.Worker):  # type: ignore[misc]
    def init_device(self) -> None:
        check_engine_version()
        super().init_device()

    def _make_model_runner(self) -> Any:
        kind = OutriderSecondRunner if self.use_v2_model_runner else OutriderGPURunner
        return kind(self.vllm_config, self.device)
