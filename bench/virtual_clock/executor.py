"""The replay's device behind vLLM's engine core: recorded tokens at a world's times, on a virtual clock.

vLLM's own engine core, scheduler and KV cache manager decide. The executor that they call to run a step plays the
recording and moves the clock.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.simulate.recording import DEPTH
from outrider_runtime.simulate.replay.device import Device, DeviceStep
from outrider_runtime.simulate.replay.engine import Log, OnDevice
from outrider_runtime.simulate.replay.replay_requests import BLOCK_TOKENS, RequestStates
from outrider_runtime.simulate.replay.workload import Ints
from outrider_runtime.vllm_plugin.device_ranking import verification_lengths
from outrider_runtime.vllm_plugin.messages import (
    IDLE,
    DraftOrder,
    DraftReport,
    StepReport,
    VerifyOrder,
    attach,
    attached_order,
    numbers,
)
from outrider_runtime.vllm_plugin.proposed import acceptance
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from bench.virtual_clock.clock import Clock

TOKEN = 7
"""Id of every token of an answer."""


class Output(Future[Any]):
    """An output that is ready at a time of the virtual clock; a caller waits until then."""

    def __init__(self, clock: Clock, at_s: float, made: ModelRunnerOutput | None) -> None:
        super().__init__()
        self._clock, self._at_s = clock, at_s
        self.set_result(made)

    def result(self, timeout: float | None = None) -> Any:
        self._clock.now_s = max(self._clock.now_s, self._at_s)
        return super().result(timeout)


class Playback(Executor):  # type: ignore[misc]  # vLLM is untyped here
    """An executor whose requests are named by their row in the load."""

    def __init__(
        self, device: Device, clock: Clock, drafter: int | None, config: Any, on_device: OnDevice | None = None,
        *, device_ranks: bool = False,
    ) -> None:  # fmt: skip
        """drafter: the one of stock vLLM; with the loop, its orders name the drafters.

        device_ranks: the device chooses what is verified among the placeholders, by the loop's orders.
        """
        self.device, self.clock, self.log = device, clock, Log()
        self._acceptance = torch.zeros(len(device.requests.load), DEPTH) if device_ranks else None
        """(requests, K): P(token accepted, its parent was) of the proposals that wait; 0: no proposal."""
        self._on_device = on_device
        self.preempted = 0
        self._drafter = drafter
        self._asynchronous = bool(config.scheduler_config.async_scheduling)
        self._free_at = 0.0
        self._awaiting_report: list[DraftReport] = []
        self._proposals: DraftTokenIds | None = None
        super().__init__(config)

    # -- what the engine core asks for before it serves ---------------------------------------------------------

    def _init_executor(self) -> None: ...

    def collective_rpc(self, method: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: ARG002
        answers = {
            "get_kv_cache_spec": {
                "layer": FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32)
            },
            "determine_available_memory": 1 << 50,  # the number of blocks is given
            "get_supported_kv_cache_layouts": ["LBNHC"],
        }
        return [answers[method]] if method in answers else []

    def check_health(self) -> None: ...

    # -- a step -------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:  # noqa: ARG002
        self._forget(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return Output(self.clock, self.clock.now_s, EMPTY_MODEL_RUNNER_OUTPUT)
        self._output = self._run_step(scheduler_output)
        return Output(self.clock, self.clock.now_s, None)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002
        return self._output if non_block else self._output.result()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the proposals of stock vLLM; with the loop they come with the output."""
        return self._proposals

    def _forget(self, output: SchedulerOutput) -> None:
        gone = np.array([int(name) for name in output.preempted_req_ids or ()], np.int64)
        self.device.forget(gone)
        self.preempted += len(gone)

    def _run_step(self, output: SchedulerOutput) -> Output:
        names = list(output.num_scheduled_tokens)
        states = self.device.requests.select(np.array([int(name) for name in names], np.int64))
        tokens = np.array(list(output.num_scheduled_tokens.values()), np.int64)
        places = np.array([len(output.scheduled_spec_decode_tokens.get(name, ())) for name in names], np.int64)
        order = attached_order(output)
        kept = self._choose_verified(states, tokens, places, order)
        tokens = tokens - places + kept
        plan, fed = (
            self._plan_stock(output, states, tokens) if order is None else self._follow_order(order, states, tokens)
        )
        proposals = self.device.proposals
        verified = np.minimum(kept, proposals.length[states.rows])
        ran = self.device.run(states, tokens, kept, proposals.accepted_lengths(states.rows, kept), plan, fed)
        if self._on_device and plan.draft_tokens:
            log_odds = proposals.log_odds(states.rows, plan.draft_tokens)
            self._on_device.step(states.rows, ran.accepted, kept, log_odds)
        began_s = max(self.clock.now_s, self._free_at)
        self._free_at = began_s + ran.seconds
        self._note(ran, len(names), int(verified.sum()))
        made = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, _sampled_tokens(ran))
        lengths = self.device.proposals.length[states.rows]
        self._proposals = DraftTokenIds(names, [[TOKEN] * length for length in lengths.tolist()])
        if order is not None:
            ranked = None if self._acceptance is None or order.verify is None else kept
            self._report(made, order, ran, states, ranked)
            self._rank_next(states, order)
        # In asynchronous mode tokens are sent before the drafters run.
        return Output(self.clock, began_s + ran.target_s if self._asynchronous else self._free_at, made)

    def _choose_verified(self, states: RequestStates, tokens: Ints, places: Ints, order: DraftOrder | None) -> Ints:
        if self._acceptance is not None and order is not None and order.verify is not None:
            return self._rank(states, places, order.verify)
        if self._on_device is None or not places.any():
            return places
        sampling = int(np.count_nonzero(states.decodes | (tokens == states.todo)))
        return self._on_device.keep(states.rows, tokens - places, places, sampling)

    def _rank(self, states: RequestStates, places: Ints, order: VerifyOrder) -> Ints:
        """Choose the placeholders (N,) that the target scores, with the code of `vllm_plugin.device_ranking`."""
        assert self._acceptance is not None
        survival = self._acceptance[states.rows].cumprod(dim=1) * torch.tensor(order.weights)[:, None]
        caps, forced = torch.tensor(places), torch.tensor(order.forced.astype(np.int64))
        return np.asarray(verification_lengths(survival, caps, forced, order.tokens).numpy(), np.int64)

    def _rank_next(self, states: RequestStates, order: DraftOrder) -> None:
        """Keep the drafters' confidences in their new proposals, in the worker's units and by its calibration."""
        if self._acceptance is None or order.calibration is None:
            return
        proposals = self.device.proposals
        said = proposals.reported_confidence(states.rows, models=True)[:, : order.calibration.intercepts.shape[1]]
        made = np.vstack([proposals.length[states.rows], proposals.drafter[states.rows], said.T]).astype(np.int8)
        self._acceptance[states.rows] = 0.0
        self._acceptance[states.rows, : said.shape[1]] = acceptance(torch.tensor(made), order.calibration)

    def _note(self, ran: DeviceStep, requests: int, verified: int) -> None:
        self.log.output_at_s.append(self._free_at)
        self.log.step_s.append(ran.seconds)
        self.log.tokens.append(int(ran.tokens.sum()))
        self.log.requests.append(requests)
        self.log.verified.append(verified)
        self.log.accepted.append(int(ran.accepted.sum()))

    # -- drafting -----------------------------------------------------------------------------------------------

    def _plan_stock(self, output: SchedulerOutput, states: RequestStates, tokens: Ints) -> tuple[DraftPlan, Ints]:
        """Plan for stock vLLM: one drafter for every request, at the scheduler's length."""
        count, requests = len(self.device.drafters), len(states.rows)
        passes, fed = np.zeros(count, np.int64), np.zeros((count, requests), np.int64)
        drafter_order = np.full((1, requests), NO_DRAFTER, np.int64)
        if self._drafter is not None and output.num_spec_tokens_to_schedule:
            passes[self._drafter], drafter_order[:] = output.num_spec_tokens_to_schedule, self._drafter
            missing, _, _ = self.device.caches.columns(states, tokens)
            fed[self._drafter] = missing[self._drafter]
        return DraftPlan(passes, np.ones_like(passes), drafter_order, fed, Purpose.FIXED), fed

    def _follow_order(self, order: DraftOrder, states: RequestStates, tokens: Ints) -> tuple[DraftPlan, Ints]:
        """Plan as ordered. A drafter with a KV cache runs over the whole step, and over the gaps that it must fill."""
        fed = np.zeros((len(order.passes), len(states.rows)), np.int64)
        for number in np.flatnonzero(order.passes != IDLE):
            if self.device.drafters[number].reads:
                fed[number] = tokens
        for gap in order.gaps:
            fed[gap.drafter, gap.request] += gap.end - gap.start
        drafter_order = np.stack([order.chosen, order.second]).astype(np.int64)
        passes = np.maximum(order.passes, 0).astype(np.int64)
        return DraftPlan(passes, np.ones_like(passes), drafter_order, fed, Purpose.FIXED), fed

    def _report(
        self, made: ModelRunnerOutput, order: DraftOrder, ran: DeviceStep, states: RequestStates, ranked: Ints | None
    ) -> None:  # fmt: skip
        """Report as the worker does: in asynchronous scheduling the report on a step's drafting goes with the next
        output. ranked: (N,), what the device chose to verify."""
        proposals = self.device.proposals
        report = DraftReport(
            order.step, ran.each_draft_s(len(order.passes)), numbers(proposals.length[states.rows]),
            numbers(proposals.drafter[states.rows]), {gap.drafter: 0.0 for gap in order.gaps},
            confidence=proposals.reported_confidence(states.rows, models=self._acceptance is not None)[
                :, : order.draft_tokens
            ],
        )  # fmt: skip
        step_report = StepReport(ran.target_s, verified=None if ranked is None else numbers(ranked))
        if self._asynchronous:
            step_report.drafts, self._awaiting_report = self._awaiting_report, [report]
        else:
            step_report.drafts = [report]
            step_report.proposals = self._proposals if order.draft_tokens else None
        self._proposals = None
        attach(made, step_report)


def _sampled_tokens(ran: DeviceStep) -> list[list[int]]:
    """Return the tokens of each request; none while its prompt is not prefilled."""
    made = np.where(ran.tokens > 0, 1 + ran.accepted, 0)
    return [[TOKEN] * count for count in made.tolist()]
