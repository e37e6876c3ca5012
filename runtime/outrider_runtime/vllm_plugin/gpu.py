"""Worker and model runners on a GPU. Not run on the build machine: tested by configuration only.

vLLM's second runner hosts EAGLE alone; draft models, drafters without a model and mixed pools run in the first
(`launch`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner

from outrider_runtime.vllm_plugin.async_steps import SUBSTITUTE, ReportedOutput, StrayTokens
from outrider_runtime.vllm_plugin.launch import load_plan
from outrider_runtime.vllm_plugin.messages import StepReport, attached_order
from outrider_runtime.vllm_plugin.runner import DraftOrders, sentence, step_report
from outrider_runtime.vllm_plugin.versions import check_engine_version

PADDING = -1


class OutriderGPURunner(DraftOrders):
    """vLLM's first runner."""


class OutriderSecondRunner(SecondRunner):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's second runner: its speculator stays idle in steps that need no draft, and costs no more than its proposals
    when it fails."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        neural = load_plan().pool.neural
        assert neural is not None, "the second runner is chosen for EAGLE alone"
        self._watch_speculator(neural.name, int(self.vllm_config.model_config.get_vocab_size()))

    def _watch_speculator(self, drafter: str, vocabulary_size: int) -> None:
        self._neural = drafter
        self._strays = StrayTokens(vocabulary_size)
        self._report = StepReport()
        self._draft_runs = True
        if self.speculator is not None:
            self.speculator.propose = self._when_ordered(self.speculator.propose)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        order = attached_order(scheduler_output)
        self._draft_runs = order is None or order.run_neural  # None: vLLM's own dummy step
        self._report = step_report(self._strays, self._neural)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        return ReportedOutput(output, self._report) if isinstance(output, AsyncModelRunnerOutput) else output

    def _when_ordered(self, propose: Any) -> Any:
        def propose_or_pad(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("dummy_run", False):
                made: torch.Tensor = propose(input_batch, *args, **kwargs)
                return made
            if not self._draft_runs:
                return self._filled(input_batch, PADDING)  # no places are scheduled for these
            try:
                proposals = propose(input_batch, *args, **kwargs)
            except Exception as error:  # whatever a drafter does, requests go on
                self._report.failures[self._neural] = sentence(error)
                return self._filled(input_batch, SUBSTITUTE)
            self._report.neural_ran = True
            return self._strays.replaced(proposals)

        return propose_or_pad

    def _filled(self, input_batch: Any, token: int) -> torch.Tensor:
        shape = (input_batch.num_reqs, self.num_speculative_steps)
        return torch.full(shape, token, dtype=torch.int64, device=self.device)


class OutriderGPUWorker(gpu_worker.Worker):  # type: ignore[misc]
    def init_device(self) -> None:
        check_engine_version()
        super().init_device()

    def _make_model_runner(self) -> Any:
        kind = OutriderSecondRunner if self.use_v2_model_runner else OutriderGPURunner
        return kind(self.vllm_config, self.device)
