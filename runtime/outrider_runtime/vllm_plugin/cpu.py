"""Worker and model runner on a CPU, where every step is synchronous (vLLM's first runner).

A request with `seed` is served here (`seeded`): stock vLLM's engine dies of one whose prompt comes in chunks. So is
one with a temperature (`sampling`): stock vLLM answers it with garbage while it speculates.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from outrider_runtime.vllm_plugin.runner import DraftOrders
from outrider_runtime.vllm_plugin.sampling import repair_speculative_sampling
from outrider_runtime.vllm_plugin.seeded import RewindableGenerator, rewindable
from outrider_runtime.vllm_plugin.versions import check_engine_version


class OutriderCPURunner(DraftOrders, CPUModelRunner):  # type: ignore[misc]
    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        corrections = super()._update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            self._make_rewindable(new.req_id)
        for generator in self.input_batch.generators.values():
            if isinstance(generator, RewindableGenerator):
                generator.mark()
        return corrections

    def _make_rewindable(self, name: str) -> None:
        state = self.requests.get(name)
        if state is None or state.generator is None:
            return
        state.generator = rewindable(state.generator)
        index = self.input_batch.req_id_to_index.get(name)
        if index is not None:
            self.input_batch.generators[index] = state.generator


class OutriderCPUWorker(cpu_worker.CPUWorker):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's worker builds its runner inline, so the class is replaced in the worker's module before it does."""

    def init_device(self) -> None:
        check_engine_version()
        repair_speculative_sampling()
        cpu_worker.CPUModelRunner = OutriderCPURunner
        super().init_device()
