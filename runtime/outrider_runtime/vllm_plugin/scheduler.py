"""vLLM's scheduler with the control loop in it (engine core process).

    schedule()                  top: how many proposals each request verifies; then vLLM schedules the step
    _update_after_schedule()    what to propose at the end of that step; then vLLM advances its books
    update_from_output()        what came of the step, and the finished requests' times

The loop itself is `outrider_runtime.loop`; here vLLM's objects become columns, and plans become vLLM's. Whatever of
it raises, the engine's step goes on without speculation.

`scheduler_cls` names the factory below: vLLM's synchronous and asynchronous schedulers are different classes, and
which one runs is known only from the resolved config.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from outrider_runtime.control.batch import Ints, Waiting
from outrider_runtime.control.plans import VerifyPlan
from outrider_runtime.identity import device_name, weights_commit
from outrider_runtime.loop.compile_loop import compile_loop
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.mounted_profile import PodIdentity
from outrider_runtime.loop.reporter import Reporter
from outrider_runtime.loop.shared_answers import AnswerSharing
from outrider_runtime.loop.stepper import Room, Stepper, View, room_in_blocks
from outrider_runtime.loop.steps import ChainCounts
from outrider_runtime.loop.waiting import decoding_first, patience_used, place_last
from outrider_runtime.vllm_plugin import draft_room, patches
from outrider_runtime.vllm_plugin.arguments import block_checkpoint
from outrider_runtime.vllm_plugin.broken_answers import BrokenAnswers
from outrider_runtime.vllm_plugin.draft_blocks import DraftBlocks
from outrider_runtime.vllm_plugin.launch import LaunchPlan, load_plan, noted_failures, target_location
from outrider_runtime.vllm_plugin.messages import (
    DraftOrder,
    attach,
    attached_order,
    attached_report,
    draft_order,
    idle_order,
    verify_order,
)
from outrider_runtime.vllm_plugin.step_messages import chain_counts, deliveries
from outrider_runtime.vllm_plugin.versions import check_engine_version
from outrider_runtime.vllm_plugin.views import limit, proposed, room, scheduled, view, view_of_step
from outrider_runtime.worker_notes import read_device_ranks, read_drafter_layers


def outrider_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler for the resolved config. Raises RuntimeError if the loop cannot run."""
    check_engine_version()
    if current_platform.is_cpu():
        import outrider_cpu

        outrider_cpu.allow_second_runner()  # vLLM checks its config once more in this process
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise RuntimeError("data parallelism inside one engine drops the table of draft lengths; use replicas instead")
    draft_room.install()
    draft_room.reserve_batch_tokens(vllm_config)
    asynchronous = vllm_config.scheduler_config.async_scheduling
    kind = OutriderAsyncScheduler if asynchronous else OutriderScheduler
    return kind(vllm_config, *args, **kwargs)


class SpeculationControl(Scheduler):  # type: ignore[misc]  # vLLM is untyped here
    """The control loop inside vLLM's scheduler: the first base class, before vLLM's own."""

    running: list[Request]
    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan = load_plan()
        self._largest_graph = _largest_graph(self.vllm_config)
        self.outrider = ControlLoop(
            plan.boot, plan.hot, plan.pool.hosted, max_requests=self.max_num_running_reqs,
            left_out={**plan.pool.dropped, **noted_failures(plan)}, largest_graph_tokens=self._largest_graph,
            page_tokens=self.block_size, device_ranks=read_device_ranks(plan.paths.run_dir),
            scores_placeholders=self.vllm_config.scheduler_config.async_scheduling,
            blocks={
                drafter.name: block_checkpoint(drafter, plan)
                for drafter in plan.pool.hosted
                if drafter.block is not None
            },
        )  # fmt: skip
        self.can_skip_drafts = False  # vLLM 0.33; the order says what runs, also in a step that needs no drafts
        self._sharing = AnswerSharing(plan.pool.hosted)
        self._broken = BrokenAnswers(self)
        self._scheduled_at = time.monotonic()
        self._planned: Sequence[str] = ()
        """Requests that the last verification plan is for."""
        self._seen: View | None = None
        """The view that it was made from; None if there was nothing to decide."""
        self._block_room_view: View | None = None
        self._block_room_tokens = 0
        """Tokens that still fit into the last blocks of the requests in `_block_room_view`."""
        self._draft_blocks = DraftBlocks(
            self.kv_cache_manager.coordinator, self.block_size, read_drafter_layers(plan.paths.run_dir)
        )
        self._stepper = self._new_stepper()
        _report_new_blocks(self.kv_cache_manager.block_pool, self._allocated)
        self._token_budget = self.max_num_scheduled_tokens
        """The engine's budget; vLLM's attribute is lower while a tight SLO class is protected."""
        compile_loop(self.outrider.settings)
        self.outrider_reporter = _reporter(plan, self.outrider)
        self.outrider_reporter.start()

    def _new_stepper(self, predecessor: Stepper | None = None) -> Stepper:
        return Stepper(
            self.outrider, block_size=self.block_size, block_ids=self._block_ids, now_s=time.monotonic(),
            reports_drafting=self.vllm_config.speculative_config is not None,
            largest_graph_tokens=self._largest_graph, predecessor=predecessor,
        )  # fmt: skip

    @contextmanager
    def _guard(self) -> Iterator[Stepper]:
        """Guard each call of the loop: an exception costs a step its drafts, and never fails a request.

        A new Stepper replaces the one that raised.
        """
        try:
            yield self._stepper
        except Exception as error:
            names = [request.request_id for request in self.running]
            self.outrider.failed(error, f"the bookkeeping after step {self._stepper.last_step}", names)
            self._stepper = self._new_stepper(self._stepper)

    # -- decide ---------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._scheduled_at = time.monotonic()
        running = list(self.running)
        self._seen = None
        self._verify_plan = plan = self._plan_verify(running)
        self._planned = () if self._seen is None else self._seen.names
        stale_pages = self._broken.free_pages()
        if plan.token_budget is None and plan.admit is None:
            output = super().schedule(throttle_prefills)
        else:
            output = self._schedule_within(plan, throttle_prefills)
        self._broken.zero(stale_pages, output)
        return output

    def _plan_verify(self, running: list[Request]) -> VerifyPlan:
        # The lock keeps the SLO classes unchanged during a decision.
        with self._guard() as stepper, self.outrider.lock:
            stepper.requests.number_classes(self.outrider.class_names)
            return self._locked_verify_plan(stepper, running)
        return self._stepper.nothing_to_verify(len(running))

    def _locked_verify_plan(self, stepper: Stepper, running: list[Request]) -> VerifyPlan:
        if not self._needs_verify_plan(running):
            return stepper.nothing_to_verify(len(running))
        self._seen = seen = view(running)
        plan = stepper.verify(seen, proposed(running), self._room(seen, self._next(), self._patience_used()))
        for request, length in zip(running, _placeholders(plan).tolist(), strict=True):
            if length < len(request.spec_token_ids):
                # Assigned, never mutated: in asynchronous scheduling all requests share one list.
                request.spec_token_ids = request.spec_token_ids[:length]
        return plan

    def _needs_verify_plan(self, running: list[Request]) -> bool:
        """Return whether there is anything to decide: proposals, or prompts that might break an SLO class's TPOT.

        Most steps without speculation have neither.
        """
        if any(request.spec_token_ids for request in running):
            return True
        return self.outrider.has_slo_classes and (
            bool(self.waiting) or any(not request.num_output_tokens or request.is_prefill_chunk for request in running)
        )

    def _patience_used(self) -> float:
        """Return the largest share of its patience that a request has used, before its first output token.

        It looks at the first waiting request and at prefills; preempted requests do not count.
        """
        if not self.outrider.has_slo_classes:
            return 0.0
        prompts = [request for request in self.running if not request.num_output_tokens]
        prompts += itertools.islice(self.waiting, 1)
        fresh = [request for request in prompts if request.status != RequestStatus.PREEMPTED]
        times = [(self._arrived_at(request), self._due_at(request)) for request in fresh]
        return patience_used(self._scheduled_at, times)

    def _schedule_within(self, plan: VerifyPlan, throttle_prefills: bool) -> SchedulerOutput:
        """Schedule with a lower token budget and fewer new requests, to protect tight SLO classes."""
        if plan.token_budget is not None:
            with self._guard():
                self.running = decoding_first(self.running, lambda request: not request.is_prefill_chunk)
            unverified = 0 if plan.device is None else int(_placeholders(plan).sum()) - plan.device.tokens
            self.max_num_scheduled_tokens = min(plan.token_budget + unverified, self._token_budget)
        most = self.max_num_active_reqs
        if plan.admit is not None:
            active = len(self.running) + self.num_waiting_for_streaming_input
            self.max_num_active_reqs = min(most, active + plan.admit)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = self._token_budget, most

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.num_scheduled_tokens:
            self._plan_draft(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _plan_draft(self, scheduler_output: SchedulerOutput) -> None:
        names = list(scheduler_output.num_scheduled_tokens)
        order: DraftOrder | None = None
        with self._guard() as stepper:
            tokens, verified = scheduled(scheduler_output)
            seen = view_of_step(self.requests, names, self._seen)
            step, ordered = stepper.draft(seen, tokens, verified, self._room(seen), self._verify_plan)
            order = draft_order(step, ordered)._replace(
                verify=verify_order(self._verify_plan, self._planned, seen.names, verified),
                calibration=self.outrider.calibration,
                shared=self._sharing.take(names, time.monotonic()),
            )
            if self.outrider.profiled_placeholders is not None:  # the worker fills those without a proposal
                order = order._replace(draft_tokens=self.outrider.profiled_placeholders)
        if order is None:
            order = idle_order(len(self.outrider.hosted), len(names))
        attach(scheduler_output, order)
        scheduler_output.num_spec_tokens_to_schedule = order.draft_tokens

    # -- observe --------------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        order, report = attached_order(scheduler_output), attached_report(model_runner_output)
        counts: ChainCounts | None = None
        with self._guard() as stepper:
            stepper.on_draft_reports(report.drafts if report is not None else ())
            # vLLM's own method trims the token lists of requests that stop, so count before it.
            counts = chain_counts(scheduler_output, model_runner_output, report)
        if report is not None:
            self._broken.end(report.broken, model_runner_output, scheduler_output.num_scheduled_tokens)
            self.outrider.broken_answers = self._broken.count
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        output_at = time.monotonic()
        with self._guard() as stepper:
            tokens = stepper.requests.deliver(deliveries(outputs), output_at)
            if order is not None and counts is not None:
                target_s = report.target_s if report is not None else math.nan
                stepper.on_output(order.step, output_at=output_at, target_s=target_s, tokens=tokens, verdicts=counts)
        if report is not None and report.proposals is not None:
            self.update_draft_token_ids(report.proposals)
        return outputs

    # -- requests come and go --------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.request_id not in self.requests:  # it was the end of a streamed session
            return
        extra = request.sampling_params.extra_args if request.sampling_params else None
        adapter = request.lora_request.lora_name if request.lora_request is not None else None
        with self._guard() as stepper:
            if request.prompt_embeds is None and not request.mm_features:
                self._sharing.register(request.request_id, adapter, extra)
            stepper.requests.arrived(
                request.request_id, request.arrival_time, extra, prompt=request.num_prompt_tokens,
                limit=limit(request, self.max_model_len),
                adapter=adapter,
            )  # fmt: skip
            # vLLM's priority policy has another kind of queue: its order is the user's, and stays.
            in_order = self.outrider.has_slo_classes and isinstance(self.waiting, FCFSRequestQueue)
            if in_order and self.waiting and self.waiting[-1] is request:
                place_last(self.waiting, self._due_at)

    def _due_at(self, request: Request) -> float:
        """Return the deadline of a waiting request: arrival plus the patience of its class; preempted ones go first."""
        if request.status == RequestStatus.PREEMPTED:
            return -math.inf
        slo_class = self._stepper.requests.slo_class(request.request_id)
        return self._arrived_at(request) + self.outrider.patience_s(slo_class)

    def _arrived_at(self, request: Request) -> float:
        return self._stepper.requests.arrived_at(request.request_id)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        with self._guard() as stepper:
            stepper.leaves(request.request_id)  # its KV is gone

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        with self._guard() as stepper:
            is_complete = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
            answer = request.output_token_ids if is_complete else None
            self._sharing.note_end(request.request_id, answer, time.monotonic())
            stepper.leaves(request.request_id)
            if request.status == RequestStatus.FINISHED_ABORTED:
                params = request.sampling_params
                stops = bool(params and params.stop)
                stepper.requests.aborted(request.request_id, time.monotonic(), has_stop_strings=stops)
        return super()._free_request(request, delay_free_blocks)

    def _free_request_blocks(self, request: Request) -> None:
        self._broken.note_abandoned(request)
        super()._free_request_blocks(request)

    def shutdown(self) -> None:
        self.outrider_reporter.stop()
        super().shutdown()

    # -- inputs of decisions ---------------------------------------------------------------------------------------

    def _next(self) -> Waiting | None:
        """Return the request that is admitted next; None without SLO classes."""
        if not self.waiting or not self.outrider.has_slo_classes:
            return None
        request = self.waiting.peek_request()
        left = request.num_tokens - request.num_computed_tokens
        slo_class = self._stepper.requests.class_number(request.request_id)
        overdue = self._scheduled_at >= self._due_at(request)
        return Waiting(slo_class, left, room(request, self.max_model_len), overdue)

    def _room(self, seen: View, waiting: Waiting | None = None, patience_used: float = 0.0) -> Room:
        if seen is not self._block_room_view:
            self._block_room_view = seen
            self._block_room_tokens = room_in_blocks(seen.context, self.block_size)
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return Room(
            now_s=self._scheduled_at,
            token_budget=self._token_budget,
            free_kv_tokens=free_blocks * self.block_size + self._block_room_tokens,
            next=waiting,
            waiting=min(len(self.waiting), self.max_num_active_reqs - len(self.running)),
            patience_used=patience_used,
        )

    def _allocated(self, blocks: Sequence[int]) -> None:
        self._broken.note_allocated(blocks)
        with self._guard() as stepper:
            stepper.caches.allocated(blocks)

    def _block_ids(self, drafter: int, request_id: str, first: int, last: int) -> Sequence[int]:
        return self._draft_blocks.ids(self.outrider.hosted[drafter].name, request_id, first, last)


class OutriderScheduler(SpeculationControl):
    """Synchronous scheduling: on CPUs, or at the user's choice."""


class OutriderAsyncScheduler(SpeculationControl, AsyncScheduler):  # type: ignore[misc]
    """Asynchronous scheduling: proposals are placeholders, which the worker fills in."""


def _reporter(plan: LaunchPlan, loop: ControlLoop) -> Reporter:
    commit = weights_commit(target_location(plan), plan.boot.target.revision)
    identity = PodIdentity(device_name(), plan.engine_version, commit)
    return Reporter(loop, plan.paths, plan.hot, identity, started_at=time.time())


def _report_new_blocks(pool: BlockPool, report: Callable[[Sequence[int]], None]) -> None:
    """Report each newly allocated block: drafters cover none of it, even if a KV connector fills it, and a broken
    request may have had it."""
    get_new_blocks = pool.get_new_blocks

    def get_and_report(*arguments: Any, **keywords: Any) -> list[Any]:
        blocks: list[Any] = get_new_blocks(*arguments, **keywords)
        report([block.block_id for block in blocks])
        return blocks

    patches.put(patches.NEW_BLOCKS, get_and_report, of=pool)


def _placeholders(plan: VerifyPlan) -> Ints:
    """(N,): placeholders to schedule for each request; with a device order the device chooses among them."""
    if plan.device is None:
        return plan.lengths
    return plan.device.caps if plan.device.tokens else np.zeros_like(plan.lengths)


def _largest_graph(vllm_config: VllmConfig) -> int | None:
    return vllm_config.compilation_config.max_cudagraph_capture_size or None
