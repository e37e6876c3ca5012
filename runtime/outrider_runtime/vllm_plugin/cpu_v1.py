"""Worker and model runner on a CPU, where every step is synchronous (vLLM's first runner).

The worker is a process of its own here (OpenMP wants one), and a call to it costs up to two milliseconds while both
cores are busy. vLLM makes three of them in a step that may propose; here a step is one call.

A request with `seed` is served here (`seeded`): stock vLLM's engine dies of one whose prompt comes in chunks. So is
one with a temperature (`sampling`): stock vLLM answers it with garbage while it speculates.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from outrider_runtime.vllm_plugin.greedy import likeliest, quicken_drafts, takes_the_largest, verified
from outrider_runtime.vllm_plugin.messages import attached_report
from outrider_runtime.vllm_plugin.runner import DraftOrders
from outrider_runtime.vllm_plugin.sampling import repair_speculative_sampling
from outrider_runtime.vllm_plugin.seeded import RewindableGenerator, rewindable
from outrider_runtime.vllm_plugin.versions import check_engine_version


class OutriderCPURunner(DraftOrders, CPUModelRunner):  # type: ignore[misc]
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        output = super().sample_tokens(grammar_output)
        report = attached_report(output)
        if report is not None and self._order is not None and self._order.draft_tokens:
            report.proposals = super().take_draft_token_ids()
        return output

    def take_draft_token_ids(self) -> None:
        """They went with the step's output."""

    def _verify(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        if self.rejection_sampler.synthetic_mode or not takes_the_largest(self.input_batch.sampling_metadata):
            return super()._verify(logits, spec_decode_metadata)
        return SamplerOutput(verified(likeliest(logits), spec_decode_metadata), None)

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
        quicken_drafts()
        cpu_worker.CPUModelRunner = OutriderCPURunner
        super().init_device()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """The whole step, but where a grammar's mask is on its way: the scheduler makes it while the target runs."""
        output = super().execute_model(scheduler_output)
        waits_for_sampling = output is None and get_pp_group().is_last_rank
        if waits_for_sampling and not scheduler_output.has_structured_output_requests:
            return self.sample_tokens(None)
        return output


class OutriderCPUExecutor(MultiprocExecutor):  # type: ignore[misc]
    def take_draft_token_ids(self) -> None:
        """Not to be asked for: they came with the step's output."""
