"""vLLM's scheduler with the control loop in it (engine core process).

    schedule()                  top: how many proposals each request verifies; then vLLM schedules the step
    _update_after_schedule()    what to propose at the end of that step; then vLLM advances its books
    update_from_output()        what came of the step, and the finished requests' times
    update_draft_token_ids()    the proposals that came back (synchronous scheduling)

`scheduler_cls` names the factory below: vLLM's synchronous and asynchronous schedulers are different classes, and
which one runs is known only from the resolved config.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from outrider_runtime.control.batch import (
    Batch,
    DraftPlan,
    Purpose,
    RequestView,
    StepOutcome,
    VerifyPlan,
    Waiting,
)
from outrider_runtime.drafters import drafter_spec
from outrider_runtime.identity import device_name, weights_commit
from outrider_runtime.vllm_plugin import cpu
from outrider_runtime.vllm_plugin.coverage import DraftCoverage, ScheduledTokens
from outrider_runtime.vllm_plugin.launch import load_plan, noted_failures, target_location
from outrider_runtime.vllm_plugin.loop import ControlLoop
from outrider_runtime.vllm_plugin.messages import (
    LEAST_CATCH_UP_TOKENS,
    NOBODY,
    DraftReport,
    Hole,
    attach,
    attached_order,
    attached_report,
)
from outrider_runtime.vllm_plugin.profiles import Identity
from outrider_runtime.vllm_plugin.reporter import Reporter
from outrider_runtime.vllm_plugin.requests import RequestBook
from outrider_runtime.vllm_plugin.step_messages import only_decodes, sampled_counts, scored_counts
from outrider_runtime.vllm_plugin.steps import (
    Asked,
    StepRecord,
    plain_step_size,
    step_outcome,
    step_size,
    untimed,
    with_drafts,
)
from outrider_runtime.vllm_plugin.versions import check_engine_version
from outrider_runtime.vllm_plugin.waiting import decoding_first, patience_used, place_last


def outrider_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:
    """The scheduler for the resolved config. Raises RuntimeError where the loop cannot run."""
    check_engine_version()
    if current_platform.is_cpu():
        cpu.allow_second_runner()  # vLLM checks its config once more in this process
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise RuntimeError("data parallelism inside one engine drops the table of draft lengths; use replicas instead")
    asynchronous = vllm_config.scheduler_config.async_scheduling
    kind = OutriderAsyncScheduler if asynchronous else OutriderScheduler
    return kind(vllm_config, *args, **kwargs)


class SpeculationControl(Scheduler):  # type: ignore[misc]  # vLLM is untyped here
    """The loop, for either scheduler; comes before vLLM's class in the order of methods."""

    running: list[Request]
    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan = load_plan()
        self.outrider = ControlLoop(
            plan, largest_graph_tokens=_largest_graph(self.vllm_config), left_out=noted_failures(plan)
        )
        self._book = RequestBook(self.outrider.slo)
        self._token_budget = self.max_num_scheduled_tokens
        """The engine's own; vLLM's attribute is lower while a tight SLO class is protected."""
        self._whole = _needs_whole_kv(self.outrider)
        """The draft model whose KV is kept book of."""
        self._coverage = None if self._whole is None else DraftCoverage(self.block_size, self._blocks)
        if self._coverage is not None:
            _tell_of_new_blocks(self.kv_cache_manager.block_pool, self._coverage)
        self._asked: dict[str, Asked] = {}
        self._draft_purpose = Purpose.FIXED
        """Of the last draft plan."""
        self._steps = itertools.count(1)
        self._scheduled: dict[int, StepRecord] = {}
        """Step -> what was planned; its output has not come in yet."""
        self._drafting: dict[int, tuple[StepRecord, StepOutcome | None]] = {}
        """Step -> what came of it (None: the loop was told); how its drafting went is not known yet."""
        self._is_told = self.vllm_config.speculative_config is not None
        """Of each step, sooner or later: the worker has a speculator."""
        self._told: dict[int, DraftReport] = {}
        """Step -> how its drafting went; what came of it is not known yet: the device may be ahead of its outputs."""
        self._scheduled_at = self._last_output_at = time.monotonic()
        location = target_location(plan)
        commit = weights_commit(location, plan.boot.target.revision)
        identity = Identity(device_name(), plan.engine_version, commit)
        self.outrider_reporter = Reporter(self.outrider, identity, started_at=time.time())
        self.outrider_reporter.start()

    # -- decide ---------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._scheduled_at = time.monotonic()
        running = list(self.running)
        self._verify_plan = self._plan_verify(running)
        for request, length in zip(running, self._verify_plan.lengths, strict=True):
            if length < len(request.spec_token_ids):
                # Assigned, never mutated: in asynchronous scheduling all requests share one list.
                request.spec_token_ids = request.spec_token_ids[:length]
        if self._verify_plan.token_budget is None and self._verify_plan.admit is None:
            return super().schedule(throttle_prefills)
        return self._schedule_within(self._verify_plan, throttle_prefills)

    def _plan_verify(self, running: list[Request]) -> VerifyPlan:
        if not self._needs_verify_plan(running):
            return VerifyPlan((0,) * len(running), self._draft_purpose)
        views = [self._waiting_view(request) for request in running]
        return self.outrider.plan_verify(self._batch(views, self._next(), self._patience_used()))

    def _needs_verify_plan(self, running: list[Request]) -> bool:
        """Whether there is anything to decide: proposals, or prompts that might break an SLO class's TPOT. In most
        steps without speculation there is not, and to turn a large batch into views takes time."""
        if any(request.spec_token_ids for request in running):
            return True
        return self.outrider.has_slo_classes and (
            bool(self.waiting) or any(not request.num_output_tokens or request.is_prefill_chunk for request in running)
        )

    def _patience_used(self) -> float:
        """By the request that waits in front, or one whose prompt is being read; preempted ones do not count."""
        if not self.outrider.has_slo_classes:
            return 0.0
        prompts = [request for request in self.running if not request.num_output_tokens]
        prompts += itertools.islice(self.waiting, 1)
        fresh = [request for request in prompts if request.status != RequestStatus.PREEMPTED]
        return patience_used(
            self._scheduled_at, [(self._book.arrived_at(one.request_id), self._due_at(one)) for one in fresh]
        )

    def _schedule_within(self, plan: VerifyPlan, throttle_prefills: bool) -> SchedulerOutput:
        """Schedule with a lower token budget and fewer new requests, so that no tight SLO class misses for them."""
        if plan.token_budget is not None:
            self.running = decoding_first(self.running, lambda request: not request.is_prefill_chunk)
            self.max_num_scheduled_tokens = min(plan.token_budget, self._token_budget)
        most = self.max_num_active_reqs
        if plan.admit is not None:
            active = len(self.running) + self.num_waiting_for_streaming_input
            self.max_num_active_reqs = min(most, active + plan.admit)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = self._token_budget, most

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        self._plan_step(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _plan_step(self, scheduler_output: SchedulerOutput) -> None:
        step = next(self._steps)
        record = self._plan_plain_step(scheduler_output, step) or self._plan_any_step(scheduler_output, step)
        self._draft_purpose = record.draft_plan.purpose
        attach(scheduler_output, record.order)
        scheduler_output.num_spec_tokens_to_schedule = record.order.draft_tokens
        self._scheduled[record.order.step] = record

    def _plan_plain_step(self, scheduler_output: SchedulerOutput, step: int) -> StepRecord | None:
        """A step that only decodes and in which nothing is proposed, planned without a look at each request: under
        load most steps are like that, and looking takes a percent of their time. None where a look is due."""
        if self._asked or self._coverage is not None or not only_decodes(scheduler_output):
            return None
        draft_plan = self.outrider.plan_plain(scheduler_output.num_scheduled_tokens.keys())
        if draft_plan is None:
            return None
        size = plain_step_size(
            scheduler_output.scheduled_cached_reqs.num_computed_tokens, _largest_graph(self.vllm_config)
        )
        order = self.outrider.idle_order(len(scheduler_output.num_scheduled_tokens))._replace(step=step)
        return StepRecord(self._scheduled_at, size, self._verify_plan, draft_plan, order)

    def _plan_any_step(self, scheduler_output: SchedulerOutput, step: int) -> StepRecord:
        scheduled = scheduler_output.num_scheduled_tokens
        batch = self._batch([self._scheduled_view(name, scheduler_output) for name in scheduled])
        draft_plan, order = self.outrider.plan_draft(batch)
        ran: list[ScheduledTokens] = []
        if self._coverage is not None:
            order = order._replace(holes=self._holes(self._coverage, draft_plan, batch))
            ran = [self._scheduled_tokens(view, scheduled[view.id]) for view in batch.requests]
            self._coverage.ran(ran, neural=order.runs(self._whole))
        size = step_size(batch.requests, scheduled, _largest_graph(self.vllm_config))
        asked = [(view, self._asked.pop(view.id)) for view in batch.requests if view.id in self._asked]
        asks = self._ask(batch, draft_plan) if draft_plan.draft_tokens else []
        order = order._replace(step=step)
        return StepRecord(self._scheduled_at, size, self._verify_plan, draft_plan, order, asked, asks, ran)

    def _ask(self, batch: Batch, plan: DraftPlan) -> list[Asked | None]:
        """Who is asked for each request at the end of the step; what it verifies in its next one."""
        asks: list[Asked | None] = []
        for drafter in plan.drafters:
            length = 0 if drafter is None else self.outrider.draft_tokens(plan, drafter)
            asks.append(None if drafter is None else Asked(drafter, length, length))
        self._asked.update({view.id: ask for view, ask in zip(batch.requests, asks, strict=True) if ask is not None})
        return asks

    def _holes(self, coverage: DraftCoverage, plan: DraftPlan, batch: Batch) -> tuple[Hole, ...]:
        """Those that the plan closes; the books count them as closed from here on."""
        made = []
        for place, view in enumerate(batch.requests if plan.catch_up else ()):
            tokens = plan.catch_up.get(view.id, 0)
            if tokens:
                assert self._whole is not None
                end = view.context_tokens - view.draft_hole + tokens
                # Later than planned where one before it in this very pass writes blocks that both share.
                start = min(coverage.seen(view.id, view.context_tokens), end - LEAST_CATCH_UP_TOKENS)
                made.append(Hole(self._whole, place, start, end))
                coverage.caught_up(view.id, start, end, view.context_tokens)
        return tuple(made)

    def _scheduled_tokens(self, view: RequestView, count: int) -> ScheduledTokens:
        unsure = max(0, view.context_tokens - self.requests[view.id].num_tokens)
        return ScheduledTokens(view.id, view.context_tokens, count, unsure)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for request_id in draft_token_ids.req_ids:
            asked, request = self._asked.get(request_id), self.requests.get(request_id)
            if asked is not None and request is not None:  # less what a grammar ruled out
                asked.proposed = len(request.spec_token_ids)

    # -- observe --------------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        order, report = attached_order(scheduler_output), attached_report(model_runner_output)
        record = self._scheduled.pop(order.step) if order is not None else None
        self._told.update({one.step: one for one in report.drafts} if report is not None else {})
        for step in [step for step in self._drafting if step in self._told]:  # of earlier steps: verified in this one
            self._drafted(*self._drafting.pop(step), self._told.pop(step))
        if record is not None and record.order.step in self._told:  # before vLLM forgets requests that finish now
            self._note_holes(record, self._told[record.order.step])
        # Before vLLM trims the lists of requests that stop.
        scored = scored_counts(scheduler_output)
        sampled = sampled_counts(model_runner_output, scored)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        tokens = self._book.deliver(outputs, now)
        if record is not None and record.size.n_batched:
            since, self._last_output_at = self._last_output_at, now
            outcome = step_outcome(record, report, sampled, scored, now=now, last_output_at=since, tokens=tokens)
            self._settle(record, outcome, self._told.pop(record.order.step, None))
        if report is not None and report.proposals is not None:
            self.update_draft_token_ids(report.proposals)
        return outputs

    def _settle(self, record: StepRecord, outcome: StepOutcome, report: DraftReport | None) -> None:
        """Tell the loop of a step as soon as its drafting is over; at once where no later step will tell."""
        if report is not None:
            self._drafted(record, outcome, report)
        elif self._scheduled and self._is_told:
            self._drafting[record.order.step] = (record, outcome)
        else:
            self.outrider.observe(untimed(outcome) if record.order.drafts else outcome)
            if self._is_told:  # with the next burst's first step: what failed, and the holes that it left
                self._drafting[record.order.step] = (record, None)

    def _drafted(self, record: StepRecord, outcome: StepOutcome | None, report: DraftReport) -> None:
        """outcome: None where the loop was told of it already."""
        names = list(self.outrider.numbers)
        self._note_holes(record, report)
        for asked, proposed, number in zip(record.asks, report.proposed, report.proposer, strict=False):
            if asked is not None:
                name = None if number == NOBODY else names[number]
                length = 0 if name is None else self.outrider.draft_tokens(record.draft_plan, name)
                asked.came_back(int(proposed), name, length)
        if outcome is not None:
            self.outrider.observe(with_drafts(outcome, record, report, names))
        for number, reason in report.failures.items():
            self.outrider.drafter_failed(names[number], reason)

    def _note_holes(self, record: StepRecord, report: DraftReport) -> None:
        """The draft was to run, and did not."""
        if self._coverage is None or self._whole is None:
            return
        if record.order.runs(self._whole) and math.isnan(report.seconds[self._whole]):
            for tokens in record.ran:
                self._coverage.missed(tokens.request_id, tokens.certain)
        if record.order.holes and math.isnan(report.catch_up_s):
            places = list(record.ran)
            for hole in record.order.holes:
                self._coverage.missed(places[hole.request].request_id, hole.start)

    # -- requests come and go --------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        extra = request.sampling_params.extra_args if request.sampling_params else None
        self._book.arrived(request.request_id, request.arrival_time, extra)
        # With vLLM's priority policy (another kind of queue) the user gave an order of their own.
        in_order = self.outrider.has_slo_classes and isinstance(self.waiting, FCFSRequestQueue)
        if in_order and self.waiting and self.waiting[-1] is request:
            place_last(self.waiting, self._due_at)

    def _due_at(self, request: Request) -> float:
        """When a waiting request has waited as long as its class bears; preempted ones go first."""
        if request.status == RequestStatus.PREEMPTED:
            return -math.inf
        slo_class, arrived_at = self._book.slo_class(request.request_id), self._book.arrived_at(request.request_id)
        return arrived_at + self.outrider.patience_s(slo_class)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._forget_coverage(request.request_id)  # its KV is gone
        self._asked.pop(request.request_id, None)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        name = request.request_id
        self.outrider.forget(name)
        self._forget_coverage(name)
        self._asked.pop(name, None)
        if request.status == RequestStatus.FINISHED_ABORTED:
            params = request.sampling_params
            self._book.aborted(name, time.monotonic(), has_stop_strings=bool(params and params.stop))
        return super()._free_request(request, delay_free_blocks)

    def _forget_coverage(self, name: str) -> None:
        if self._coverage is not None:
            self._coverage.forget(name)

    def shutdown(self) -> None:
        self.outrider_reporter.stop()
        super().shutdown()

    # -- what the controller sees ----------------------------------------------------------------------------------

    def _next(self) -> Waiting | None:
        """Who is let in next, as far as SLO classes ask."""
        if not self.waiting or not self.outrider.has_slo_classes:
            return None
        request = self.waiting.peek_request()
        left = request.num_tokens - request.num_computed_tokens
        overdue = self._scheduled_at >= self._due_at(request)
        answer = self._room(request)
        return Waiting(self._book.slo_class(request.request_id), left, answer, overdue)

    def _batch(self, views: list[RequestView], waiting: Waiting | None = None, patience_used: float = 0.0) -> Batch:
        pool = self.kv_cache_manager.block_pool
        return Batch(
            requests=tuple(views),
            now=self._scheduled_at,
            token_budget=self._token_budget,
            free_kv_tokens=pool.get_num_free_blocks() * self.block_size,
            next=waiting,
            waiting=min(len(self.waiting), self.max_num_active_reqs - len(self.running)),
            patience_used=patience_used,
        )

    def _waiting_view(self, request: Request) -> RequestView:
        """A running request before the step is scheduled."""
        left = max(0, request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)
        prefill = left if left > 1 else 0  # one token is the last sampled one: the request decodes
        chunk = min(prefill, self._token_budget)
        return self._view(request, prefill=chunk, left=prefill - chunk, proposed=len(request.spec_token_ids))

    def _scheduled_view(self, name: str, scheduler_output: SchedulerOutput) -> RequestView:
        """A request of the step that was just scheduled; vLLM has not yet advanced its computed tokens."""
        request = self.requests[name]
        verified = scheduler_output.scheduled_spec_decode_tokens.get(name, ())
        known = scheduler_output.num_scheduled_tokens[name] - len(verified)
        total = request.num_tokens + request.num_output_placeholders
        left = max(0, total - request.num_computed_tokens - known)
        decodes = known == 1 and left == 0 and request.num_output_tokens + request.num_output_placeholders > 0
        return self._view(request, prefill=0 if decodes else known, left=left, proposed=len(verified))

    def _view(self, request: Request, *, prefill: int, left: int, proposed: int) -> RequestView:
        name, context = request.request_id, request.num_computed_tokens
        seen = context if self._coverage is None else self._coverage.seen(name, context)
        known = request.num_tokens >= context  # else proposals are under verification, counted as accepted
        return RequestView(
            id=name,
            slo_class=self._book.slo_class(name),
            context_tokens=context,
            prefill_tokens=prefill,
            prefill_left=left,
            output_tokens=request.num_output_tokens,
            remaining_tokens=self._remaining(request),
            elapsed_s=self._book.elapsed_s(name, self._scheduled_at),
            proposed=proposed,
            drafter=self._asked[name].drafter if proposed and name in self._asked else None,
            draft_ready=seen == context,
            draft_hole=context - seen if known and context - seen >= LEAST_CATCH_UP_TOKENS else 0,
        )

    def _remaining(self, request: Request) -> int:
        """Tokens that the request may still get; 1 for one that is sampled with a seed, so that nothing is proposed for
        it: a token that replaces a rejected one is drawn otherwise than a plain one, so the seed would not repeat its
        answer."""
        sampling = request.sampling_params
        if sampling is not None and sampling.seed is not None and sampling.temperature > 0:
            return 1
        return self._room(request)

    def _room(self, request: Request) -> int:
        """Tokens that max_tokens and max_model_len leave it."""
        given = request.num_output_tokens
        return max(0, int(min(request.max_tokens - given, self.max_model_len - request.num_tokens)))

    def _blocks(self, request_id: str, first: int, last: int) -> list[int]:
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1:
            return []  # several kinds of cache: blocks of one do not tell about the others
        return [block.block_id for block in managers[0].req_to_blocks[request_id][first : last + 1]]


class OutriderScheduler(SpeculationControl):
    """Synchronous scheduling: on CPUs, and where the user wants it."""


class OutriderAsyncScheduler(SpeculationControl, AsyncScheduler):  # type: ignore[misc]
    """Asynchronous scheduling: proposals are placeholders here, the worker fills them in."""


def _needs_whole_kv(loop: ControlLoop) -> int | None:
    """Number of the draft whose proposals over a hole in its KV are junk, if the engine hosts one."""
    drafters = loop.plan.pool.neural
    whole = [one.name for one in drafters if drafter_spec(one).needs_whole_kv and one.name not in loop.dropped]
    return loop.numbers[whole[0]] if whole else None


def _tell_of_new_blocks(pool: BlockPool, coverage: DraftCoverage) -> None:
    """Whoever fills a new block, a KV connector too, the draft has seen nothing of it."""
    get_new_blocks = pool.get_new_blocks

    def told(*arguments: Any, **keywords: Any) -> list[Any]:
        blocks: list[Any] = get_new_blocks(*arguments, **keywords)
        coverage.allocated([block.block_id for block in blocks])
        return blocks

    pool.get_new_blocks = told


def _largest_graph(vllm_config: VllmConfig) -> int | None:
    return vllm_config.compilation_config.max_cudagraph_capture_size or None
