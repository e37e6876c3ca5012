"""vLLM's first model runner, carrying out the scheduler's draft orders (worker process; CPU, and GPU where it serves).

Differences to stock vLLM: at K = 0 the draft's forward does not run unless the order says so; drafters without a model
are hosted beside a neural one, and each request gets the proposals of the drafter that was chosen for it; target and
drafts are timed; a drafter that raises or proposes nonsense costs its proposals, never the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from outrider_runtime.vllm_plugin.async_steps import SUBSTITUTE, ReportedOutput, StrayTokens
from outrider_runtime.vllm_plugin.catch_up import run_over_holes
from outrider_runtime.vllm_plugin.launch import FAILURE_FILE, RUN_DIR_VARIABLE, LaunchPlan, load_plan
from outrider_runtime.vllm_plugin.messages import DraftOrder, StepReport, attach, attached_order
from outrider_runtime.vllm_plugin.model_free import History, ModelFreeHost
from outrider_runtime.vllm_plugin.prompt_lookup import PromptLookupHost
from outrider_runtime.vllm_plugin.suffix import SuffixHost

Proposals = list[list[int]]


class DraftOrders(GPUModelRunner):  # type: ignore[misc]  # vLLM is untyped here
    """For the runners of CPU and GPU alike; comes before vLLM's class in the order of methods."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        try:
            super().__init__(vllm_config, device)  # no weights yet, but the drafter is built and checked here
        except Exception as error:
            note_drafter_failure(error)
            raise
        plan = load_plan()
        self._neural = plan.pool.neural.name if plan.pool.neural is not None else ""
        self._model_free = model_free_hosts(plan, self.max_model_len)
        self._vocabulary_size = int(self.model_config.get_vocab_size())
        self._strays = StrayTokens(self._vocabulary_size)
        self._report = StepReport()
        self._order: DraftOrder | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load target and drafter; a drafter that cannot load leaves a note for the next attempt without it."""
        drafter = getattr(self, "drafter", None)
        if drafter is not None and hasattr(drafter, "load_model"):
            drafter.load_model = _noting_failure(drafter.load_model)
        super().load_model(*args, **kwargs)

    # -- one step -------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self._report = step_report(self._strays, self._neural)
        self._order = attached_order(scheduler_output)
        self._tell_finished(scheduler_output.finished_req_ids)
        self._began_at = time.perf_counter()
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        output = super().sample_tokens(grammar_output)
        if isinstance(output, ModelRunnerOutput) and output.req_ids:
            spent = time.perf_counter() - self._began_at
            report = self._report
            report.target_s = spent - sum(report.draft_s.values()) - (report.catch_up_s or 0.0)
            attach(output, self._report)
        if isinstance(output, AsyncModelRunnerOutput):
            self._report.draft_s.clear()  # the host only launched them
            self._report.catch_up_s = None
            return ReportedOutput(output, self._report)
        return output

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """Sample a step without proposals as plain decoding does: vLLM would run its rejection sampler over nothing,
        which costs time, and raises on a CPU when a request has a top-k."""
        if spec_decode_metadata is None or spec_decode_metadata.max_spec_len == 0:
            return super()._sample(logits, None)
        return self._verify(logits, spec_decode_metadata)

    def _verify(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """Sample a step with proposals."""
        return super()._sample(logits, spec_decode_metadata)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always hand over to `propose_draft_token_ids`: near max_model_len vLLM would give the whole batch zeros
        as proposals, which the target then verifies in vain."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self, scheduler_output: SchedulerOutput, sampled_token_ids: Any, *arguments: Any
    ) -> torch.Tensor | Proposals:
        """Proposals in the batch's order; ragged lists in synchronous scheduling, a tensor in asynchronous."""
        order = self._order
        if order is None:  # vLLM's own dummy step
            stock: torch.Tensor = super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *arguments)
            return stock
        neural = self._propose_neural(order, scheduler_output, sampled_token_ids, arguments)
        if self.use_async_scheduling:
            return self._propose_async(neural, sampled_token_ids)
        return self._assemble(order, neural, sampled_token_ids)

    # -- neural ---------------------------------------------------------------------------------------------------

    def _propose_neural(
        self, order: DraftOrder, scheduler_output: SchedulerOutput, sampled_token_ids: Any, arguments: tuple[Any, ...]
    ) -> torch.Tensor | None:
        """(batch, neural_tokens) proposals of the neural drafter; None when it did not run. Never raises."""
        if not (order.run_neural or order.catch_ups) or not self._neural:
            return None
        if not super()._input_fits_in_drafter(arguments[-2]):  # common_attn_metadata
            return None
        try:
            if order.catch_ups:
                self._catch_up(order, arguments)
            return self._run_neural(order, scheduler_output, sampled_token_ids, arguments) if order.run_neural else None
        except Exception as error:  # whatever a drafter does, requests go on
            self._report.failures[self._neural] = sentence(error)
            return None

    def _catch_up(self, order: DraftOrder, arguments: tuple[Any, ...]) -> None:
        began_at = time.perf_counter()
        try:
            rows = [self.input_batch.req_id_to_index[one.request_id] for one in order.catch_ups]
            run_over_holes(self.drafter, order.catch_ups, rows, arguments)
            self._report.caught_up = True
        finally:
            self._report.catch_up_s = time.perf_counter() - began_at

    def _run_neural(
        self, order: DraftOrder, scheduler_output: SchedulerOutput, sampled_token_ids: Any, arguments: tuple[Any, ...]
    ) -> torch.Tensor:
        began_at = time.perf_counter()
        planned = scheduler_output.num_spec_tokens_to_schedule
        scheduler_output.num_spec_tokens_to_schedule = order.neural_tokens
        try:
            proposals: torch.Tensor = super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *arguments)
            self._report.neural_ran = True
        finally:
            scheduler_output.num_spec_tokens_to_schedule = planned  # the scheduler's own, in one process
            self._report.draft_s[self._neural] = time.perf_counter() - began_at
        return proposals

    def _propose_async(self, neural: torch.Tensor | None, sampled_token_ids: Any) -> torch.Tensor:
        """Asynchronous scheduling (GPU) reads the sampled tokens of a step from what the drafter prepares."""
        if neural is not None:
            return self._strays.replaced(neural)
        next_token_ids, counts = self.drafter.prepare_next_token_ids_padded(
            sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
        )
        self._copy_valid_sampled_token_count(next_token_ids, counts)
        width = 0 if not self._report.failures else self.num_spec_tokens  # then places were scheduled already
        return torch.full((next_token_ids.shape[0], width), SUBSTITUTE, device=self.device, dtype=torch.int32)

    # -- drafters without a model, and the choice per request ---------------------------------------------------------

    def _assemble(self, order: DraftOrder, neural: torch.Tensor | None, sampled_token_ids: Any) -> Proposals:
        names = self.input_batch.req_ids
        proposals: Proposals = [[] for _ in names]
        if order.draft_tokens == 0:
            return proposals
        rows = neural.tolist() if neural is not None else []
        sampled: Sequence[Sequence[int]] = ()  # vLLM has written them into the history already
        if not isinstance(sampled_token_ids, list) and not self._model_free.keys().isdisjoint(order.drafters.values()):
            sampled = sampled_token_ids.tolist()
        for drafter, places in _places(order, names).items():
            if drafter in self._model_free:
                found = self._propose_model_free(drafter, places, sampled, order.draft_tokens)
            else:
                found = [rows[place] for place in places] if rows else []
            for place, row in zip(places, self._inside_vocabulary(drafter, found), strict=False):
                proposals[place] = row
        if rows:
            self._stand_in(order, rows, proposals)
        return proposals

    def _stand_in(self, order: DraftOrder, rows: Proposals, proposals: Proposals) -> None:
        """The neural drafter's proposals where the request's own drafter found nothing."""
        names = self.input_batch.req_ids
        empty = [place for place, name in enumerate(names) if name in order.stand_in_for and not proposals[place]]
        found = self._inside_vocabulary(self._neural, [rows[place] for place in empty])
        for place, row in zip(empty, found, strict=False):
            proposals[place] = row
        self._report.stood_in_for = tuple(names[place] for place in empty) if found else ()

    def _propose_model_free(
        self, drafter: str, places: Sequence[int], sampled: Sequence[Sequence[int]], draft_tokens: int
    ) -> Proposals:
        """A row for each of `places` in the batch; no row at all when the drafter fails."""
        began_at = time.perf_counter()
        host = self._model_free[drafter]
        try:
            histories = [self._history(place, sampled[place] if sampled else ()) for place in places]
            return [host.propose(one, draft_tokens) if one is not None else [] for one in histories]
        except Exception as error:  # whatever a drafter does, requests go on
            self._report.failures[drafter] = sentence(error)
            return []
        finally:
            self._report.draft_s[drafter] = time.perf_counter() - began_at

    def _history(self, place: int, sampled: Sequence[int]) -> History | None:
        """None for a request whose prompt is unfinished."""
        if self.discard_request_mask.np[place]:
            return None
        batch = self.input_batch
        tokens = batch.token_ids_cpu[place, : int(batch.num_tokens_no_spec[place])]
        real = [token for token in sampled if token >= 0]
        if real:
            tokens = np.concatenate([tokens, np.asarray(real, dtype=np.int32)])
        return History(batch.req_ids[place], tokens, int(batch.num_prompt_tokens[place]))

    def _tell_finished(self, names: Iterable[str]) -> None:
        finished = [(name, self.requests[name]) for name in names if name in self.requests]
        for drafter, host in self._model_free.items():
            try:
                for name, request in finished:
                    host.finished(name, request.output_token_ids)
            except Exception as error:  # whatever a drafter does, requests go on
                self._report.failures[drafter] = sentence(error)

    def _inside_vocabulary(self, drafter: str, rows: Proposals) -> Proposals:
        """The drafter's proposals, unless one of them is no token at all: then none of them."""
        wrong = next((token for row in rows for token in row if not 0 <= token < self._vocabulary_size), None)
        if wrong is None:
            return rows
        self._report.failures[drafter] = f"it proposed token {wrong}, outside the vocabulary of {self._vocabulary_size}"
        return []


def _places(order: DraftOrder, names: Sequence[str]) -> dict[str, list[int]]:
    """Drafter -> places in the batch of the requests that it was chosen for."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        if name in order.drafters:
            places.setdefault(order.drafters[name], []).append(place)
    return places


def model_free_hosts(plan: LaunchPlan, max_model_len: int) -> dict[str, ModelFreeHost]:
    """Drafter name -> host, for each of the plan's drafters without a model."""
    hosts: dict[str, ModelFreeHost] = {}
    for drafter in plan.pool.model_free:
        if drafter.suffix is not None:
            hosts[drafter.name] = SuffixHost(drafter.suffix, max_model_len)
        elif drafter.prompt_lookup is not None:
            hosts[drafter.name] = PromptLookupHost(drafter.prompt_lookup, max_model_len)
    return hosts


def step_report(strays: StrayTokens, neural: str) -> StepReport:
    """A new step's report, with what the device has meanwhile said about the neural drafter's earlier proposals."""
    found = strays.found()
    return StepReport(failures={neural: found} if found else {})


def _noting_failure(load: Any) -> Any:
    def load_or_note(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except Exception as error:
            note_drafter_failure(error)
            raise

    return load_or_note


def note_drafter_failure(error: Exception) -> None:
    """Tell the process that starts the engine (`launch.after_failure`) that the drafter is to blame."""
    Path(os.environ[RUN_DIR_VARIABLE], FAILURE_FILE).write_text(
        f"the draft model cannot be loaded: {sentence(error)}", encoding="utf-8"
    )


def sentence(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
