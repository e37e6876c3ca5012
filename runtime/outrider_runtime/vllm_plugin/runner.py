"""vLLM's V2 model runner, which carries out the scheduler's draft orders (worker process, on GPUs and CPUs)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu import cudagraph_utils

from outrider_runtime.finite_weights import broken_requests, refuse_broken_target, state_sums
from outrider_runtime.step_clock import step_clock
from outrider_runtime.vllm_plugin import draft_room, patches
from outrider_runtime.vllm_plugin.adapters import RunnerWithAdapters
from outrider_runtime.vllm_plugin.agreement import among, check_same_pool
from outrider_runtime.vllm_plugin.device_ranking import DeviceRanking, Verified, device_ranks
from outrider_runtime.vllm_plugin.drafting_step import DraftingStep
from outrider_runtime.vllm_plugin.graph_lengths import any_length_fits, capture_every_length, verification
from outrider_runtime.vllm_plugin.graphs import offer_whole_graphs
from outrider_runtime.vllm_plugin.launch import load_plan, note_failure
from outrider_runtime.vllm_plugin.memory import does_not_fit, heaviest, left_out_to_fit, no_room_for_graphs
from outrider_runtime.vllm_plugin.messages import StepReport, attach, attached_order
from outrider_runtime.vllm_plugin.pool_members import pool_speculator
from outrider_runtime.vllm_plugin.versions import check_enough_kv_cache_memory
from outrider_runtime.worker_notes import write_device_ranks, write_verification


class PoolRunner(RunnerWithAdapters):
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        capture_every_length()
        draft_room.install()
        self._plan = load_plan()
        self._clock = step_clock(device)
        check_same_pool([drafter.name for drafter in self._plan.pool.hosted], get_tp_group().cpu_group)
        self._agree = among(get_tp_group().cpu_group)
        self._reports = get_tp_group().rank_in_group == 0
        """Whether this rank reports: the executor reads one rank's output and drops the others'."""
        self._ranking: DeviceRanking | None = None
        """None: the scheduler's lengths are final."""
        self._drafting: deque[DraftingStep] = deque()
        """Steps whose drafting was not reported yet."""
        with patches.in_place(patches.SPECULATOR, partial(pool_speculator, self._plan, self._agree, self.adapt)):
            super().__init__(vllm_config, device)
        self._asynchronous = bool(vllm_config.scheduler_config.async_scheduling)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, with hidden states for all heads.

        vLLM's own function is for one head, and ends the engine if the target cannot output its hidden states.
        """
        with patches.in_place(patches.HEADS_STATES, self._expose_hidden_states):
            super().load_model(*args, **kwargs)
        if self.vllm_config.load_config.load_format != "dummy":
            refuse_broken_target(self.model)

    def _expose_hidden_states(self, target_model: Any, _speculative_config: Any, *_pipeline: bool) -> None:  # vLLM 0.33
        self.use_aux_hidden_state_outputs = self.speculator.expose_hidden_states(target_model)

    def leave_out_to_fit(self, free_bytes: int) -> None:
        """Note drafters to leave out if the KV cache cannot hold a request of the longest length.

        vLLM ends in that case, and is started again without them.
        """
        config, specs = self.vllm_config, self.get_kv_cache_spec()
        if self.speculator is None or config.model_config.original_max_model_len == -1:  # vLLM fits the length
            return
        try:
            check_enough_kv_cache_memory(config, specs, free_bytes)
        except ValueError:
            takes, on_gpu = self.speculator.memory_use(specs), self.device.type != "cpu"
            needed = sum(spec.max_memory_usage_bytes(config) for spec in specs.values())
            reason = does_not_fit(takes, free_bytes, needed, config.model_config.max_model_len)
            for name in left_out_to_fit(takes, max(1, needed - free_bytes), shares_with_kv=on_gpu):
                note_failure(name, reason)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        with patches.in_place(patches.TARGET_GRAPHS, self._graphs):
            super().initialize_kv_cache(*args, **kwargs)
        offer_whole_graphs(self.cudagraph_manager)
        self._let_device_rank()
        if self._reports:
            write_verification(self._plan.paths.run_dir, verification(self.cudagraph_manager))
            write_device_ranks(self._plan.paths.run_dir, device_ranks=self._ranking is not None)

    def _let_device_rank(self) -> None:
        """Have the device rank proposals if it can; vLLM's own manager works for its own speculators only."""
        ranks = self.speculator is not None and device_ranks(self)
        self._ranking = DeviceRanking(self, self._clock) if ranks else None
        patches.put(patches.RANKING[0], self._ranking, of=self)
        if ranks:
            patches.put(patches.RANKING[1], True, of=self.rejection_sampler)
        if self.speculator is not None:
            self.speculator.serve_ranking(device_ranks=ranks)

    def capture_model(self, *args: Any, **kwargs: Any) -> Any:
        """Capture the target's graphs; note a drafter to leave out if memory runs out.

        vLLM ends in that case, and is started again without it. For drafters' graphs see `PoolSpeculator.capture`.
        """
        try:
            return super().capture_model(*args, **kwargs)
        except torch.OutOfMemoryError:
            takes = {} if self.speculator is None else self.speculator.memory_use(self.get_kv_cache_spec())
            name = heaviest(takes)
            if name is not None:
                note_failure(name, no_room_for_graphs(name, takes[name]))
            raise

    def _graphs(self, *args: Any, **kwargs: Any) -> Any:
        """Make the manager of the target's graphs, and tell heads, which run over its batch, what the graphs take."""
        if self.speculator is not None:
            kwargs["varlen_decode"] = self.speculator.any_length_fits = any_length_fits(self)
        return cudagraph_utils.ModelCudaGraphManager(*args, **kwargs)

    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, batch_state: Any, graph: Any, *args: Any, **kwargs: Any
    ) -> Any:  # fmt: skip
        """Prepare attention for the longest request that the graph was captured for, not for the batch's longest.

        Some kernels split their work differently if each request has one token.
        """
        batch = super().prepare_inputs(scheduler_output, batch_state, graph, *args, **kwargs)
        batch.max_query_len = graph.max_query_len
        return batch

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.new_block_ids_to_zero and self.kv_block_zeroer is None:
            self._init_kv_zero_meta()  # vLLM makes it for some targets only
        order = attached_order(scheduler_output)
        names = list(scheduler_output.num_scheduled_tokens)
        self._step = None if order is None else DraftingStep(order, names, self._clock, self._agree)
        if self.speculator is not None:
            self.speculator.step = self._step
        if self._ranking is not None:
            self._ranking.begin(None if order is None else order.verify)
        self._began = self._clock.mark()
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        sums = state_sums(hidden_states, input_batch)
        sampled = super().sample(hidden_states, input_batch, *args, **kwargs)
        _, tokens, _ = sampled
        overflows = self.output_overflows(input_batch, tokens)
        sums = sums if overflows is None else sums.masked_fill(overflows, torch.nan)
        self._state_sums = input_batch.req_ids, self._clock.to_host(sums)
        self._sampled = self._clock.mark()
        return sampled

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        output = super().sample_tokens(grammar_output)
        if self._step is None or not isinstance(output, AsyncModelRunnerOutput):
            return output
        if self.speculator is not None and self._reports:
            self._drafting.append(self._step)
        verified = None if self._ranking is None else self._ranking.verified
        report = partial(self._report, self._step, self._began, self._sampled, verified, *self._state_sums)
        return ReportedOutput(output, report)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return proposals only in asynchronous scheduling; otherwise they travel with the step's output."""
        return super().take_draft_token_ids() if self._asynchronous else None

    def _report(
        self, step: DraftingStep, began: Any, sampled: Any, verified: Verified | None, names: Sequence[str],
        sums: torch.Tensor,
    ) -> StepReport:  # fmt: skip
        report = StepReport(self._clock.seconds(began, sampled), broken=broken_requests(names, sums))
        report.verified = None if verified is None else verified.by_column()
        if step in self._drafting and not self._asynchronous and step.order.draft_tokens:
            report.proposals = self._real_proposals(step)
        while self._drafting and self._drafting[0].over:
            report.drafts.append(self._drafting.popleft().report())
        return report

    def _real_proposals(self, step: DraftingStep) -> DraftTokenIds:
        """Return each request's real proposals, without filler.

        It waits for them: vLLM has waited only for the sampled tokens, which are ready long before.
        """
        step.wait()
        names = self.draft_tokens_handler.req_ids
        rows = [self.req_states.req_id_to_index[name] for name in names]
        tokens = self.req_states.draft_tokens[rows].tolist()
        return DraftTokenIds(names, [row[:count] for row, count in zip(tokens, step.lengths(), strict=True)])


class CPUPoolRunner(PoolRunner, CPUModelRunner):  # type: ignore[misc]
    """The runner on a CPU."""


class ReportedOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """A pending output, with the report on its step; vLLM calls it on a thread, or at a time, that may wait."""

    def __init__(self, output: AsyncModelRunnerOutput, report: Callable[[], StepReport]) -> None:
        self._output = output
        self._report = report

    def get_output(self) -> ModelRunnerOutput:
        made = self._output.get_output()
        attach(made, self._report())
        return made

    def get_kv_connector_output(self) -> Any:  # vLLM 0.33
        return self._output.get_kv_connector_output()
