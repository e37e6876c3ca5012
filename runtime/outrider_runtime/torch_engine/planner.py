"""The engine's side to the loop: what the loop's decisions hang on, and what it learns of each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider_runtime.control.data.batch import Waiting
from outrider_runtime.control.data.forest import Nodes
from outrider_runtime.control.data.plans import VerifyPlan
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.orders import Order
from outrider_runtime.loop.requests import Delivery
from outrider_runtime.loop.stepper import Room, Stepper, View
from outrider_runtime.loop.steps import Verdicts
from outrider_runtime.loop.waiting import patience_used
from outrider_runtime.torch_engine.batch_scheduler import TARGET, BatchScheduler, ScheduledRequest
from outrider_runtime.torch_engine.drafting import DraftReport
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.tree import column, nodes_of

NO_PREFIX_CACHE_BLOCK = 1 << 40
"""Longer than any request: the loop's books of shared blocks stay empty."""


class Planner:
    def __init__(self, loop: ControlLoop, scheduler: BatchScheduler, pool: KVPool, longest: int, now: float) -> None:
        """longest: tokens that a request may have, its prompt's included."""
        self._loop, self._scheduler, self._pool, self._longest = loop, scheduler, pool, longest
        self._stepper = Stepper(
            loop, block_size=NO_PREFIX_CACHE_BLOCK, block_ids=lambda _drafter, _name, _first, _last: [],
            drafting_is_told=True, now=now,
        )  # fmt: skip
        self._requests = self._stepper.requests
        self._now = now
        """When the step began."""

    # -- requests come and go -----------------------------------------------------------------------------------

    def arrived(self, request: Request, arrived_at: float, extra_args: dict[str, object] | None) -> None:
        """Says how long it may wait, and who is preempted before it. arrived_at: Unix seconds."""
        limit = len(request.tokens) + self.left(request)
        self._requests.arrived(request.name, arrived_at, extra_args, prompt=request.prompt, limit=limit)
        of = self._requests.slo_class(request.name)
        request.due_at = self._requests.arrived_at(request.name) + self._loop.patience_s(of)
        request.looseness = self._loop.tpot_s(of)

    def aborted(self, name: str, now: float) -> None:
        self._requests.aborted(name, now, has_stop_strings=False)

    def forget(self, name: str) -> None:
        """Nothing is cached of it any more."""
        self._stepper.leaves(name)

    def lost(self, drafter: int, name: str) -> None:
        """Its KV in this drafter is gone."""
        self._stepper.kv_lost(drafter, name)

    def left(self, request: Request) -> int:
        """Tokens that its answer may still get."""
        return min(request.stops.max_tokens - request.emitted, self._longest - len(request.tokens))

    # -- a step -------------------------------------------------------------------------------------------------

    def plan_verify(self, now: float) -> VerifyPlan:
        """Leaves each request the nodes that are verified."""
        self._now = now
        with self._loop.lock:  # a hot change waits until all of one decision has looked at the same classes
            self._requests.number_classes(self._loop.class_names)
            running = self._scheduler.running
            if not self._needs_verify_plan(running):
                return self._stepper.nothing_to_verify(len(running))
            room = self._room(running, self._next(), self._patience_used())
            plan = self._stepper.verify(_view(running), _nodes(running), room)
        _choose(running, plan)
        return plan

    def plan_draft(self, step: Sequence[ScheduledRequest], plan: VerifyPlan) -> tuple[int, Order]:
        """The step's number, and who proposes at its end."""
        requests = [one.request for one in step]
        return self._stepper.draft(
            _view(requests), column([one.tokens for one in step]), column([one.proposals for one in step]),
            self._room(requests), plan, _nodes(requests),
        )  # fmt: skip

    def observe(
        self, report: DraftReport, delivered: Sequence[Delivery], target_s: float, judged: Verdicts, now: float
    ) -> None:
        """Before requests that have ended are forgotten."""
        self._stepper.news([report])
        tokens = self._requests.deliver(delivered, now)
        self._stepper.done(report.step, now=now, target_s=target_s, tokens=tokens, verdicts=judged)

    # -- what decisions hang on ---------------------------------------------------------------------------------

    def _needs_verify_plan(self, running: Sequence[Request]) -> bool:
        """Whether there are proposals, or prompts that might break an SLO class's TPOT."""
        if any(len(one.proposals) for one in running):
            return True
        prompts = bool(self._scheduler.waiting) or any(not one.decodes for one in running)
        return prompts and self._loop.has_slo_classes

    def _room(self, requests: Sequence[Request], waiting: Waiting | None = None, used: float = 0.0) -> Room:
        limits, scheduler = self._scheduler.limits, self._scheduler
        return Room(
            now=self._now, token_budget=limits.tokens, free_kv_tokens=self._free_kv_tokens(requests), next=waiting,
            waiting=min(len(scheduler.waiting), limits.requests - len(scheduler.running)), patience_used=used,
        )  # fmt: skip

    def _free_kv_tokens(self, requests: Sequence[Request]) -> int:
        """Of memory that nobody holds, and of the requests' own buffers."""
        in_buffers = sum(self._pool.tokens(Holder(TARGET, one.name)) - one.computed for one in requests)
        return self._pool.free_tokens(TARGET) + in_buffers

    def _next(self) -> Waiting | None:
        """Who is let in next, as far as SLO classes ask."""
        if not self._scheduler.waiting or not self._loop.has_slo_classes:
            return None
        request = self._scheduler.waiting[0]
        slo_class = self._requests.class_number(request.name)
        return Waiting(slo_class, request.todo, self.left(request), self._now >= request.due_at)

    def _patience_used(self) -> float:
        """By the request that waits in front, or one whose prompt is being read; preempted ones do not count."""
        if not self._loop.has_slo_classes:
            return 0.0
        prompts = [one for one in self._scheduler.running if not one.emitted] + list(self._scheduler.waiting)[:1]
        return patience_used(
            self._now,
            [(self._requests.arrived_at(one.name), one.due_at) for one in prompts if not one.was_preempted],
        )


def _choose(running: Sequence[Request], plan: VerifyPlan) -> None:
    first = 0
    for request in running:
        end = first + len(request.proposals)
        request.chosen = np.flatnonzero(plan.nodes[first:end]).tolist()
        first = end


def _view(requests: Sequence[Request]) -> View:
    return View(
        names=[one.name for one in requests],
        context=column([one.computed for one in requests]),
        known=column([len(one.tokens) for one in requests]),
        todo=column([one.todo for one in requests]),
        emitted=column([one.emitted for one in requests]),
    )


def _nodes(requests: Sequence[Request]) -> Nodes:
    return nodes_of([one.proposals for one in requests])
