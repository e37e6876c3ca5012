"""A simulated engine that runs the real controller: synchronous scheduling, continuous batching, chunked prefill.

It keeps the books that vLLM's scheduler and worker keep (who prefills, how much KV is left, whose draft KV has holes),
draws acceptance from the world's hazards, and lets noisy time pass. The controller gets what it gets in a pod: views of
the requests, and measured times of what ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from outrider_runtime.control.batch import (
    Batch,
    CatchUpOutcome,
    DraftPlan,
    ExecutionMode,
    Miss,
    RequestOutcome,
    RequestView,
    StepOutcome,
    VerifyPlan,
    Waiting,
)
from outrider_runtime.control.costs import Shape
from outrider_runtime.simulate.books import Finished, Request
from outrider_runtime.simulate.scheduling import Due, Limits, Scheduler
from outrider_runtime.simulate.truth import Chance, World
from outrider_runtime.simulate.workload import Arrival, Source

Listener = Callable[[StepOutcome], None]


class Policy(Protocol):
    """What decides: `control.controller.Controller`, or anything with its calls."""

    def plan_verify(self, batch: Batch) -> VerifyPlan: ...
    def plan_draft(self, batch: Batch) -> DraftPlan: ...
    def observe(self, outcome: StepOutcome) -> None: ...
    def forget(self, request_id: str) -> None: ...


class Engine:
    """One pod's engine."""

    def __init__(
        self, world: World, policy: Policy, source: Source, limits: Limits, rng: np.random.Generator,
        *, start_s: float = 0.0, listener: Listener | None = None, due: Due | None = None,
    ) -> None:  # fmt: skip
        """`listener` is told of each finished step. `due`: the order of those that wait; None: as they came."""
        self.world, self.policy, self.source = world, policy, source
        self.now = start_s
        self.finished: list[Finished] = []
        self.refused = 0
        """Requests too long for this engine."""
        self._scheduler = Scheduler(limits, due)
        self._chance = Chance(rng)
        self._listener = listener
        self._number = 0

    @property
    def active(self) -> int:
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def run(self) -> None:
        """Until every request that the source has is finished."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """One step, or the wait for the next request; False when there is nothing more to do."""
        self._accept_arrivals()
        if self.active:
            self.step()
            return True
        next_at_s = self.source.next_at_s()
        if next_at_s is None:
            return False
        self.now = max(self.now, next_at_s)
        return True

    def step(self) -> StepOutcome:
        """One engine step; some request must be there."""
        scheduler, budget = self._scheduler, self._scheduler.limits.token_budget
        waiting = self._batch([request.waiting_view(self.now, budget) for request in scheduler.running])
        verify_plan = self.policy.plan_verify(replace(waiting, patience_used=scheduler.patience_used(self.now)))
        requests = scheduler.schedule(verify_plan.lengths, verify_plan.token_budget, admit=verify_plan.admit)
        views = [request.scheduled_view(self.now) for request in requests]
        draft_plan = self.policy.plan_draft(self._batch(views))
        outcome = self._execute(requests, views, verify_plan, draft_plan)
        self._propose(requests, views, draft_plan)
        self.policy.observe(outcome)
        if self._listener is not None:
            self._listener(outcome)
        self._retire(requests)
        return outcome

    def _batch(self, views: Sequence[RequestView]) -> Batch:
        limits = self._scheduler.limits
        free_tokens = self._scheduler.cache.free_tokens
        waiting = min(len(self._scheduler.waiting), limits.max_requests - len(self._scheduler.running))
        return Batch(tuple(views), self.now, limits.token_budget, free_tokens, next=self._next(), waiting=waiting)

    def _next(self) -> Waiting | None:
        scheduler = self._scheduler
        if not scheduler.waiting:
            return None
        request = scheduler.waiting[0]
        overdue = scheduler.due is not None and self.now >= scheduler.due(request)
        return Waiting(request.slo_class, request.left, request.output - request.produced, overdue)

    def _accept_arrivals(self) -> None:
        for arrival in self.source.due(self.now, self.active):
            self._number += 1
            request = _request(self._number, arrival)
            if self._scheduler.fits(request):
                self._scheduler.enqueue(request)
            else:
                self.refused += 1

    def _execute(
        self, requests: Sequence[Request], views: Sequence[RequestView], verify_plan: VerifyPlan, draft_plan: DraftPlan
    ) -> StepOutcome:
        world, noisy, noise = self.world, self._chance.noisy, self.world.noise
        prefill = [view.prefill_tokens for view in views]
        prompts = sum(prefill)
        shape = _shape(requests, prompts)
        mode = _mode(requests, prompts, shape.n_batched, world.largest_graph_tokens)
        target_s = noisy(world.target_s(shape, mode), noise)
        draft_s = {name: noisy(spent, noise) for name, spent in world.draft_s(draft_plan, shape, prompts).items()}
        caught = self._catch_up(views, draft_plan) if draft_plan.catch_up else None
        step_s = target_s + sum(draft_s.values()) + (caught.seconds if caught else 0.0) + world.overhead_s
        if world.hidden_s and any(request.verified for request in requests):
            step_s += world.hidden_s
        started, self.now = self.now, self.now + step_s
        outcomes, tokens = self._sample(requests, prefill, started)
        return StepOutcome(
            now=self.now, step_s=step_s, target_s=target_s, n_context=int(shape.n_context),
            n_batched=int(shape.n_batched), n_requests=len(requests), n_decoding=prefill.count(0), mode=mode,
            tokens=tokens, verify_plan=verify_plan, draft_plan=draft_plan, requests=outcomes, draft_s=draft_s,
            n_context_query=shape.n_context_query, prefill_tokens=prompts, catch_up=caught,
        )  # fmt: skip

    def _catch_up(self, views: Sequence[RequestView], plan: DraftPlan) -> CatchUpOutcome:
        """What the draft's forward over holes takes."""
        pairs = [
            (view.context_tokens - view.draft_hole, plan.catch_up[view.id])
            for view in views
            if view.id in plan.catch_up
        ]
        tokens, context = sum(count for _, count in pairs), sum(start for start, _ in pairs)
        cross = sum(start * count for start, count in pairs) / 1000
        seconds = self.world.catch_up_s(Shape(context, tokens, len(pairs), cross))
        return CatchUpOutcome(tokens, len(pairs), context, cross, self._chance.noisy(seconds, self.world.noise))

    def _sample(
        self, requests: Sequence[Request], prefill: Sequence[int], started: float
    ) -> tuple[tuple[RequestOutcome, ...], int]:
        """Accept, give out tokens and advance the books; outcomes of those somebody was asked for, and all tokens."""
        outcomes: list[RequestOutcome] = []
        total = 0
        for request, chunk in zip(requests, prefill, strict=True):
            verified = request.verified
            accepted = self._accepted(request, started) if verified else 0
            request.context += request.scheduled - verified + accepted
            if chunk and request.left > 0:
                continue  # a chunk of a prompt yields no token
            if not chunk and request.asked:
                outcomes.append(_outcome(request, verified, accepted))
            if request.produced == 0:
                request.first_token_at = self.now
            tokens = min(1 + accepted, request.output - request.produced)
            request.produced += tokens
            total += tokens
        return tuple(outcomes), total

    def _accepted(self, request: Request, now: float) -> int:
        """One uniform number against the products of hazards: its rank is the accepted length."""
        assert request.drafter is not None
        path = self.world.path(request.drafter, request.slo_class, request.number, now)
        drawn, accepted = self._chance.uniform(), 0
        while accepted < request.verified and drawn < path[accepted]:
            accepted += 1
        return accepted

    def _propose(self, requests: Sequence[Request], views: Sequence[RequestView], plan: DraftPlan) -> None:
        """What comes back from the drafters, and the holes that a skipped draft pass leaves."""
        hit_rate = self.world.hit_rate
        for request, view, drafter in zip(requests, views, plan.drafters, strict=True):
            request.drafted = self._drafted(request, view, plan)
            request.drafter = drafter
            if drafter is None:
                request.asked = request.proposed = 0
                continue
            neural = drafter == self.world.neural
            request.asked = request.proposed = plan.neural_tokens if neural else plan.draft_tokens
            request.missed = None
            if drafter in hit_rate and self._chance.uniform() >= hit_rate[drafter]:
                request.proposed = 0
                if plan.neural_tokens and view.draft_ready:
                    self._stand_in(request, drafter, plan)

    def _stand_in(self, request: Request, drafter: str, plan: DraftPlan) -> None:
        """The neural drafter's proposals, where the one that was asked found nothing."""
        request.missed = Miss(drafter, request.asked)
        request.drafter = self.world.neural
        request.asked = request.proposed = plan.neural_tokens

    def _drafted(self, request: Request, view: RequestView, plan: DraftPlan) -> int:
        """Tokens that the draft has seen after the step; what it writes behind a hole does not count."""
        if not self.world.holes_matter:
            return request.context
        before = min(request.drafted, view.context_tokens) + plan.catch_up.get(request.id, 0)
        ran = plan.run_neural and (plan.prefill_draft or not view.prefill_tokens)
        return request.context if ran and before >= view.context_tokens else before

    def _retire(self, requests: Sequence[Request]) -> None:
        done = [request for request in requests if request.produced >= request.output]
        if not done:
            return
        self._scheduler.finish(done)
        for request in done:
            self.policy.forget(request.id)
            self.finished.append(_finished(request, self.now))


def _request(number: int, arrival: Arrival) -> Request:
    return Request(
        number, f"request-{number}", arrival, arrival.slo_class, arrival.prompt_tokens, arrival.output_tokens
    )


def _finished(request: Request, now: float) -> Finished:
    arrived_at = request.arrival.at_s
    return Finished(
        request.slo_class, arrived_at, request.first_token_at - arrived_at, now - arrived_at, request.produced,
        request.preemptions,
    )  # fmt: skip


def _outcome(request: Request, verified: int, accepted: int) -> RequestOutcome:
    return RequestOutcome(
        request.id, request.slo_class, request.drafter, request.asked, request.proposed, verified, accepted,
        request.missed,
    )  # fmt: skip


def _shape(requests: Sequence[Request], prompts: int) -> Shape:
    context = batched = cross = 0
    for request in requests:
        context += request.context
        batched += request.scheduled
        cross += request.context * request.scheduled
    return Shape(context, batched, len(requests), cross / 1000, prompts)


def _mode(requests: Sequence[Request], prefill: int, batched: float, largest_graph: int | None) -> ExecutionMode:
    """Which set of coefficients the step belongs to."""
    if largest_graph is not None and batched > largest_graph:
        return ExecutionMode.BEYOND_GRAPH
    even = prefill == 0 and batched == requests[0].scheduled * len(requests)
    even = even and all(request.scheduled == requests[0].scheduled for request in requests)
    return ExecutionMode.UNIFORM if even else ExecutionMode.RAGGED
