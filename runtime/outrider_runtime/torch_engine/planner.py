"""The engine's side of the control loop: the inputs of its decisions, and the report of each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider_runtime.control.batch import Waiting
from outrider_runtime.control.plans import Nodes, VerifyPlan
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.orders import Order
from outrider_runtime.loop.request_table import Delivery
from outrider_runtime.loop.stepper import Room, Stepper, View
from outrider_runtime.loop.steps import NodeVerdicts
from outrider_runtime.loop.waiting import patience_used
from outrider_runtime.torch_engine.batch_scheduler import TARGET, BatchScheduler, ScheduledRequest
from outrider_runtime.torch_engine.drafting import DraftOutcome
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.tree import column, to_nodes

NO_PREFIX_CACHE_BLOCK = 1 << 40
"""Tokens of a KV block, more than any request has: this engine has no blocks, so the loop's block tables stay empty."""


class Planner:
    """Translates between the engine's requests and the control loop's columns."""

    def __init__(self, loop: ControlLoop, scheduler: BatchScheduler, pool: KVPool, longest: int, now_s: float) -> None:
        """longest: tokens that prompt and answer may have together. now_s: seconds of the engine's clock."""
        self._loop = loop
        self._scheduler = scheduler
        self._pool = pool
        self._longest = longest
        self._stepper = Stepper(
            loop, block_size=NO_PREFIX_CACHE_BLOCK, block_ids=lambda _drafter, _name, _first, _last: [],
            reports_drafting=True, now_s=now_s,
        )  # fmt: skip
        self._requests = self._stepper.requests
        self._step_began_at = now_s
        """Seconds of the engine's clock at which the step began."""

    # -- requests come and go -----------------------------------------------------------------------------------

    def register(self, request: Request, arrived_at: float, extra_args: dict[str, object] | None) -> None:
        """Register a request, and set on it when it is due and its class's TPOT. arrived_at: Unix seconds."""
        limit = len(request.tokens) + self.tokens_left(request)
        self._requests.arrived(request.name, arrived_at, extra_args, prompt=request.prompt_tokens, limit=limit)
        class_of_request = self._requests.slo_class(request.name)
        request.due_at = self._requests.arrived_at(request.name) + self._loop.patience_s(class_of_request)
        request.tpot_s = self._loop.tpot_s(class_of_request)

    def note_abort(self, name: str, now_s: float) -> None:
        """Note that the request's client left."""
        self._requests.aborted(name, now_s, has_stop_strings=False)

    def forget(self, name: str) -> None:
        """Note that the request's KV is gone in every model."""
        self._stepper.leaves(name)

    def kv_lost(self, drafter: int, name: str) -> None:
        """Note that the request's KV in one drafter is gone."""
        self._stepper.kv_lost(drafter, name)

    def tokens_left(self, request: Request) -> int:
        """Tokens that the request's answer may still get."""
        return min(request.stops.max_tokens - request.emitted, self._longest - len(request.tokens))

    # -- a step -------------------------------------------------------------------------------------------------

    def plan_verify(self, now_s: float) -> VerifyPlan:
        """Plan the target's pass, and leave each running request the proposals that it verifies."""
        self._step_began_at = now_s
        with self._loop.lock:  # a configuration change waits, so that one decision sees one set of SLO classes
            self._requests.number_classes(self._loop.class_names)
            running = self._scheduler.running
            if not self._needs_verify_plan(running):
                return self._stepper.nothing_to_verify(len(running))
            room = self._room(running, self._next_waiting(), self._patience_used())
            plan = self._stepper.verify(_view(running), _nodes(running), room)
        _choose(running, plan)
        return plan

    def plan_draft(self, step: Sequence[ScheduledRequest], plan: VerifyPlan) -> tuple[int, Order]:
        """Return the step's number, and the order that says which drafters propose at its end."""
        requests = [scheduled.request for scheduled in step]
        return self._stepper.draft(
            _view(requests), column([scheduled.tokens for scheduled in step]),
            column([scheduled.proposals for scheduled in step]),
            self._room(requests), plan, _nodes(requests),
        )  # fmt: skip

    def observe(
        self, report: DraftOutcome, delivered: Sequence[Delivery], target_s: float, judged: NodeVerdicts, now_s: float
    ) -> None:
        """Report a step to the control loop. Call it before complete requests are forgotten."""
        self._stepper.on_draft_reports([report])
        tokens = self._requests.deliver(delivered, now_s)
        self._stepper.on_output(report.step, output_at=now_s, target_s=target_s, tokens=tokens, verdicts=judged)

    # -- inputs of decisions ------------------------------------------------------------------------------------

    def _needs_verify_plan(self, running: Sequence[Request]) -> bool:
        """Whether there are proposals to verify, or prefills that might break an SLO class's TPOT."""
        if any(len(request.proposals) for request in running):
            return True
        has_prefill = bool(self._scheduler.waiting) or any(not request.decodes for request in running)
        return has_prefill and self._loop.has_slo_classes

    def _room(self, requests: Sequence[Request], waiting: Waiting | None = None, used: float = 0.0) -> Room:
        """Describe what the step has room for. used: share of the patience that prefills have used up."""
        scheduler = self._scheduler
        limits = scheduler.limits
        return Room(
            now_s=self._step_began_at, token_budget=limits.tokens, free_kv_tokens=self._free_kv_tokens(requests),
            next=waiting, waiting=min(len(scheduler.waiting), limits.requests - len(scheduler.running)),
            patience_used=used,
        )  # fmt: skip

    def _free_kv_tokens(self, requests: Sequence[Request]) -> int:
        """Target tokens that fit into free memory and into the unused part of the requests' own buffers."""
        in_buffers = sum(self._pool.tokens(Holder(TARGET, request.name)) - request.computed for request in requests)
        return self._pool.free_tokens(TARGET) + in_buffers

    def _next_waiting(self) -> Waiting | None:
        """Describe the request that is admitted next; None when there is none, or no SLO class that needs to know."""
        if not self._scheduler.waiting or not self._loop.has_slo_classes:
            return None
        request = self._scheduler.waiting[0]
        slo_class = self._requests.class_number(request.name)
        return Waiting(slo_class, request.todo, self.tokens_left(request), self._step_began_at >= request.due_at)

    def _patience_used(self) -> float:
        """Largest share of its patience that a prefill, running or first in the queue, has used up.

        Preempted requests do not count: they have started once.
        """
        if not self._loop.has_slo_classes:
            return 0.0
        first_waiting = list(self._scheduler.waiting)[:1]
        prefills = [request for request in self._scheduler.running if not request.emitted] + first_waiting
        return patience_used(
            self._step_began_at,
            [
                (self._requests.arrived_at(request.name), request.due_at)
                for request in prefills
                if not request.was_preempted
            ],
        )


def _choose(running: Sequence[Request], plan: VerifyPlan) -> None:
    """Split the plan's nodes, a column over all requests' proposals, into each request's chosen ones."""
    first = 0
    for request in running:
        end = first + len(request.proposals)
        request.chosen = np.flatnonzero(plan.nodes[first:end]).tolist()
        first = end


def _view(requests: Sequence[Request]) -> View:
    return View(
        names=[request.name for request in requests],
        context=column([request.computed for request in requests]),
        known=column([len(request.tokens) for request in requests]),
        todo=column([request.todo for request in requests]),
        emitted=column([request.emitted for request in requests]),
    )


def _nodes(requests: Sequence[Request]) -> Nodes:
    return to_nodes([request.proposals for request in requests])
