"""Who runs in the next step, over how many tokens, and who must make room."""

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
    requests: int
    """That run at once."""
    tokens: int
    """Of a step."""


class ScheduledRequest(NamedTuple):
    request: Request
    tokens: int
    """From its first one that is not computed on, its proposals last."""
    proposals: int
    """How many of `tokens` are some."""

    @property
    def known(self) -> int:
        """Tokens of its text."""
        return self.tokens - self.proposals

    @property
    def draws(self) -> bool:
        """Its last known token is in the step, so that the next one can be drawn."""
        return self.known == self.request.todo


class BatchScheduler:
    """Continuous batching: requests that run come first, then those that wait, while tokens and memory last."""

    def __init__(self, pool: KVPool, limits: SchedulerLimits) -> None:
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.limits = limits
        self.idle_models: Sequence[int] = ()
        """Whose KV goes first when memory is short: drafters that did not run in the last step."""
        self.active_models: Sequence[int] = ()
        self.on_preempt: Callable[[Request], None] = lambda _request: None
        self._pool = pool

    def add(self, request: Request) -> None:
        """It waits behind those that are due before it."""
        self.waiting.append(request)
        place_last(self.waiting, lambda one: float("-inf") if one.was_preempted else one.due_at)

    def finish(self, request: Request) -> None:
        """It has ended, or its client left."""
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self._pool.release_all(request.name)

    def schedule(self, *, token_budget: int | None = None, admit: int | None = None) -> list[ScheduledRequest]:
        """One step. token_budget: fewer tokens than the limit, decoding requests first. admit: most that may start."""
        left = self.limits.tokens if token_budget is None else min(token_budget, self.limits.tokens)
        order = list(self.running)
        if token_budget is not None:
            order = decoding_first(order, lambda one: one.decodes)
        step: list[ScheduledRequest] = []
        for request in order:
            if request in self.running:  # nobody before it needed its room
                self._schedule(request, left - _tokens(step), step)
        step = [self._with_room(one) for one in step]
        if all(request in self.running for request in order):  # memory is not short
            self._admit(left, admit, step)
        return step

    def _schedule(self, request: Request, left: int, step: list[ScheduledRequest]) -> None:
        """Room for its known tokens; `_with_room` finds that for its proposals."""
        known = min(request.todo, left)
        request.chosen = request.chosen[: max(0, left - known)]
        if known > 0 and self._make_room(request, known, step):
            step.append(ScheduledRequest(request, known + len(request.chosen), len(request.chosen)))

    def _make_room(self, request: Request, tokens: int, step: list[ScheduledRequest]) -> bool:
        """Drafters' KV goes first, then other requests. False: it was itself the one to make room."""
        while not self._grow(request, tokens):
            if self._drop_drafters_kv():
                continue
            last_of_the_loosest = max(range(len(self.running)), key=lambda n: (self.running[n].looseness, n))
            victim = self.running[last_of_the_loosest]
            step[:] = [one for one in step if one.request is not victim]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _with_room(self, one: ScheduledRequest) -> ScheduledRequest:
        """With as many proposals as find room once all known tokens have theirs; nobody makes any for them."""
        request, holder = one.request, Holder(TARGET, one.request.name)
        room = self._pool.tokens(holder) + self._pool.free_tokens(TARGET)
        request.chosen = request.chosen[: room - request.computed - one.known]
        tokens = one.known + len(request.chosen)
        self._grow(request, tokens)
        return ScheduledRequest(request, tokens, len(request.chosen))

    def _drop_drafters_kv(self) -> bool:
        return self._pool.drop_one(self._drafters)

    @property
    def _drafters(self) -> Sequence[int]:
        """The first ones give way first."""
        return (*self.idle_models, *self.active_models)

    def _grow(self, request: Request, tokens: int) -> bool:
        return self._pool.grow(Holder(TARGET, request.name), request.computed + tokens)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._pool.release_all(request.name)
        request.computed, request.proposals, request.chosen, request.was_preempted = 0, Tree(), (), True
        self.waiting.appendleft(request)
        self.on_preempt(request)

    def _admit(self, budget: int, admit: int | None, step: list[ScheduledRequest]) -> None:
        """Nobody is preempted for a newcomer; one starts where all of its tokens would find room."""
        most = self.limits.requests if admit is None else min(self.limits.requests, len(self.running) + admit)
        while self.waiting and len(self.running) < most and _tokens(step) < budget:
            request = self.waiting[0]
            if not self._has_room(request):
                return
            self.running.append(self.waiting.popleft())
            self._schedule(request, budget - _tokens(step), step)

    def _has_room(self, request: Request) -> bool:
        """Drafters' KV makes room for it, where that is enough; else it would be read again for nothing."""
        if self._pool.free_tokens(TARGET, without=self._drafters) <= request.todo:
            return not self.running  # alone it always fits
        while self._pool.free_tokens(TARGET) <= request.todo:
            self._drop_drafters_kv()
        return True


def _tokens(step: Sequence[ScheduledRequest]) -> int:
    return sum(one.tokens for one in step)
