"""Decides which requests run in the next step, over how many tokens each, and which are preempted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider_runtime.loop.waiting import decoding_first, place_last
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.tree import Tree

TARGET = 0
"""The target's number among the models of the KV pool."""


class SchedulerLimits(NamedTuple):
    """The most that runs at once."""

    requests: int
    tokens: int
    """Tokens of one step, over all requests."""


class ScheduledRequest(NamedTuple):
    """One request's part of a step."""

    request: Request
    tokens: int
    """Tokens that the target runs over: known ones from `request.computed` on, then proposals."""
    proposals: int
    """How many of `tokens` are proposals."""

    @property
    def known(self) -> int:
        """Tokens of the step that belong to the prompt or the answer."""
        return self.tokens - self.proposals

    @property
    def draws(self) -> bool:
        """Whether the request's last known token is in the step, so that the next one can be drawn."""
        return self.known == self.request.todo


class BatchScheduler:
    """Continuous batching: running requests come first, then waiting ones, while the step's tokens and memory last."""

    def __init__(self, pool: KVPool, limits: SchedulerLimits) -> None:
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.limits = limits
        self.idle_models: Sequence[int] = ()
        """Drafters that did not run in the last step: when memory is short, their KV is freed first."""
        self.active_models: Sequence[int] = ()
        """Drafters that ran in the last step: their KV is freed next, before a request is preempted."""
        self.on_preempt: Callable[[Request], None] = lambda _request: None
        self._pool = pool

    def add(self, request: Request) -> None:
        """Queue a request behind those that are due before it; preempted ones stay in front."""
        self.waiting.append(request)
        place_last(self.waiting, lambda queued: float("-inf") if queued.was_preempted else queued.due_at)

    def finish(self, request: Request) -> None:
        """Remove a request that has ended or whose client left, and free its memory."""
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self._pool.release_all(request.name)

    def schedule(self, *, token_budget: int | None = None, admit: int | None = None) -> list[ScheduledRequest]:
        """Decide what the next step runs.

        token_budget: fewer tokens than the limit; decoding requests then come first. admit: how many waiting requests
        may start; None: as many as fit.
        """
        budget = self.limits.tokens if token_budget is None else min(token_budget, self.limits.tokens)
        order = list(self.running)
        if token_budget is not None:
            order = decoding_first(order, lambda request: request.decodes)
        step: list[ScheduledRequest] = []
        for request in order:
            if request in self.running:  # it was not preempted to make room for one before it
                self._schedule(request, budget - _tokens(step), step)
        step = [self._fit_proposals(scheduled) for scheduled in step]
        if all(request in self.running for request in order):  # memory is not short
            self._admit(budget, admit, step)
        return step

    def _schedule(self, request: Request, tokens_left: int, step: list[ScheduledRequest]) -> None:
        """Add a request to the step, with memory for its known tokens; `_fit_proposals` finds that of its proposals."""
        known = min(request.todo, tokens_left)
        request.chosen = request.chosen[: max(0, tokens_left - known)]
        if known > 0 and self._make_room(request, known, step):
            step.append(ScheduledRequest(request, known + len(request.chosen), len(request.chosen)))

    def _make_room(self, request: Request, tokens: int, step: list[ScheduledRequest]) -> bool:
        """Free drafters' KV, then preempt requests, until `tokens` fit; False when `request` itself was preempted."""
        while not self._grow(request, tokens):
            if self._drop_drafters_kv():
                continue
            victim_index = max(range(len(self.running)), key=lambda index: (self.running[index].tpot_s, index))
            victim = self.running[victim_index]  # the loosest TPOT; among equals the one that started last
            step[:] = [scheduled for scheduled in step if scheduled.request is not victim]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _fit_proposals(self, scheduled: ScheduledRequest) -> ScheduledRequest:
        """Keep the proposals that fit into the memory left by all known tokens; nothing is freed for proposals."""
        request = scheduled.request
        room = self._pool.tokens(Holder(TARGET, request.name)) + self._pool.free_tokens(TARGET)
        request.chosen = request.chosen[: room - request.computed - scheduled.known]
        tokens = scheduled.known + len(request.chosen)
        self._grow(request, tokens)
        return ScheduledRequest(request, tokens, len(request.chosen))

    def _drop_drafters_kv(self) -> bool:
        """Free one drafter's KV of one request; False when drafters hold none."""
        return self._pool.drop_one(self._drafters)

    @property
    def _drafters(self) -> Sequence[int]:
        """Numbers of the drafters, in the order in which their KV is freed."""
        return (*self.idle_models, *self.active_models)

    def _grow(self, request: Request, tokens: int) -> bool:
        return self._pool.grow(Holder(TARGET, request.name), request.computed + tokens)

    def _preempt(self, request: Request) -> None:
        """Free the request's memory and put it in front of the queue; its tokens are prefilled again later."""
        self.running.remove(request)
        self._pool.release_all(request.name)
        request.computed = 0
        request.proposals = Tree()
        request.chosen = ()
        request.was_preempted = True
        self.waiting.appendleft(request)
        self.on_preempt(request)

    def _admit(self, budget: int, admit: int | None, step: list[ScheduledRequest]) -> None:
        """Start waiting requests whose known tokens all fit; a running request is never preempted for one."""
        most = self.limits.requests if admit is None else min(self.limits.requests, len(self.running) + admit)
        while self.waiting and len(self.running) < most and _tokens(step) < budget:
            request = self.waiting[0]
            if not self._has_room(request):
                return
            self.running.append(self.waiting.popleft())
            self._schedule(request, budget - _tokens(step), step)

    def _has_room(self, request: Request) -> bool:
        """Free drafters' KV for a waiting request, but only if that is enough: freed KV must be computed again."""
        if self._pool.free_tokens(TARGET, without=self._drafters) <= request.todo:
            return not self.running  # a single request always fits
        while self._pool.free_tokens(TARGET) <= request.todo:
            self._drop_drafters_kv()
        return True


def _tokens(step: Sequence[ScheduledRequest]) -> int:
    return sum(scheduled.tokens for scheduled in step)
