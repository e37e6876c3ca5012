"""The engine: requests come in, and at every step some of their tokens go out.

    plan_verify -> schedule -> run -> plan_draft -> propose -> observe

One thread calls all of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.orders import Order
from outrider_runtime.loop.requests import Delivery, End
from outrider_runtime.step_clock import HostClock, StepClock
from outrider_runtime.torch_engine.batch_scheduler import BatchScheduler, ScheduledRequest, SchedulerLimits
from outrider_runtime.torch_engine.commit import (
    AcceptedPath,
    Committed,
    FinishReason,
    JudgedTree,
    commit,
    verdicts,
    walk,
)
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftReport, RequestStep, TorchDrafter, draft
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel
from outrider_runtime.torch_engine.planner import Planner
from outrider_runtime.torch_engine.target_pass import Drawn, draw_behind, segment_of
from outrider_runtime.torch_engine.token_sampling import TokenLogprobs, logprobs_of
from outrider_runtime.torch_engine.tree import Tree


class Output(NamedTuple):
    """What a step gives one request's user."""

    request: str
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    """Of each token; empty where none were asked for."""
    finish: FinishReason | None
    stop_reason: int | str | None


class StepResult(NamedTuple):
    """What came of a step for its requests."""

    outputs: list[Output]
    ran: list[RequestStep]
    """Those that go on."""
    judged: list[JudgedTree]
    """What became of proposals."""


@dataclass(slots=True, eq=False)
class EngineModels:
    target: CachedModel
    drafters: Sequence[TorchDrafter]
    """In the order of the loop's; one with KV is the pool's model of its place + 1."""
    between: tuple[int, ...] = ()
    """Layers of the target whose input heads read."""


class InferenceEngine:
    def __init__(
        self, models: EngineModels, pool: KVPool, loop: ControlLoop, limits: SchedulerLimits, longest: int,
        clock: Callable[[], float] = time.monotonic, step_clock: StepClock | None = None,
    ) -> None:  # fmt: skip
        """longest: tokens that a request may have, its prompt's included."""
        self.longest = longest
        self.scheduler = BatchScheduler(pool, limits)
        self._models, self._pool = models, pool
        self._clock, self._step_clock = clock, step_clock or HostClock()
        self._planner = Planner(loop, self.scheduler, pool, longest, clock())
        self._there: dict[str, Request] = {}
        self._set_idle(np.zeros(len(models.drafters), bool))
        pool.on_drop = self._on_drop
        self.scheduler.on_preempt = self._forget

    @property
    def has_work(self) -> bool:
        return bool(self._there)

    @property
    def free_kv_bytes(self) -> int:
        return self._pool.free_bytes

    @property
    def free_kv_tokens(self) -> int:
        """Tokens that target and drafters could all cache."""
        return self._pool.free_tokens_of_all

    # -- requests come and go -----------------------------------------------------------------------------------

    def add(self, request: Request, arrived_at: float, extra_args: dict[str, object] | None = None) -> None:
        """arrived_at: Unix seconds. extra_args: the request's class, or its own SLO."""
        self._planner.arrived(request, arrived_at, extra_args)
        self._there[request.name] = request
        self.scheduler.add(request)

    def abort(self, name: str) -> None:
        """Its client has left; nothing happens where it has ended."""
        if name in self._there:
            self._planner.aborted(name, self._clock())
            self._leave(name)

    def _leave(self, name: str) -> None:
        request = self._there.pop(name)
        self.scheduler.finish(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Nothing is cached of it any more."""
        self._models.target.cache.forget(request.name)
        for drafter in self._models.drafters:
            drafter.forget(request.name)
        self._planner.forget(request.name)

    def _on_drop(self, holder: Holder) -> None:
        """A drafter's KV of a request made room."""
        number = holder.model - 1
        self._models.drafters[number].forget(holder.request)
        self._planner.lost(number, holder.request)

    # -- a step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Empty where nobody can run."""
        plan = self._planner.plan_verify(self._clock())
        scheduled = self.scheduler.schedule(token_budget=plan.token_budget, admit=plan.admit)
        if not scheduled:
            return []
        began, target = self._step_clock.mark(), self._models.target
        hidden = target.run([segment_of(one) for one in scheduled], self._pool, self._models.between)
        drawn = draw_behind(scheduled, hidden.last, target.decoder)
        target_s = self._step_clock.seconds(began, self._step_clock.mark())
        number, order = self._planner.plan_draft(scheduled, plan)
        step = self._commit(scheduled, drawn)
        report = self._propose(number, order, scheduled, CommittedStep(step.ran, hidden.between))
        self._observe(report, step, target_s)
        return step.outputs

    def _commit(self, scheduled: Sequence[ScheduledRequest], drawn: Sequence[Drawn | None]) -> StepResult:
        step, first_row = StepResult([], [], []), 0
        for place, (one, own) in enumerate(zip(scheduled, drawn, strict=True)):
            start, kept, goes_on = one.request.computed, list(range(one.known)), True
            if own is not None:
                path, done = self._answer(one.request, own)
                step.judged.append(JudgedTree(one.request.proposals, one.request.chosen, path))
                step.outputs.append(_output(one.request, done, own, path))
                kept += [one.known + one.request.chosen.index(node) for node in path.places[1:]]
                goes_on = done.finish is None
            one.request.proposals, one.request.chosen = Tree(), ()
            if goes_on:
                self._keep(one.request, kept)
                step.ran.append(RequestStep(one.request, place, start, [first_row + token for token in kept]))
            first_row += one.tokens
        return step

    def _answer(self, request: Request, drawn: Drawn) -> tuple[AcceptedPath, Committed]:
        """The path as far as it is part of the answer."""
        path = walk(request.proposals, drawn.tokens)
        done = commit(request, path.tokens, self.longest)
        return path.until(len(done.tokens)), done

    def _keep(self, request: Request, places: Sequence[int]) -> None:
        """Of the step's KV; places: among the request's own tokens of the step."""
        self._models.target.cache[request.name].keep(request.computed, places)
        request.computed += len(places)

    def _propose(
        self, number: int, order: Order, scheduled: Sequence[ScheduledRequest], finished: CommittedStep
    ) -> DraftReport:
        self._set_idle(order.runs)
        requests = [one.request for one in scheduled]
        report = draft(self._models.drafters, number, order, requests, finished, self._step_clock)
        for request in (one.request for one in finished.ran):
            request.proposals = request.proposals.within(self._planner.left(request) - 1)  # beside the bonus token
        return report

    def _observe(self, report: DraftReport, step: StepResult, target_s: float) -> None:
        delivered = [
            Delivery(one.request, len(one.tokens), End.COMPLETE if one.finish else None) for one in step.outputs
        ]
        self._planner.observe(report, delivered, target_s, verdicts(step.judged), self._clock())
        for one in step.outputs:
            if one.finish is not None:
                self._leave(one.request)

    def _set_idle(self, runs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """runs: (D,), drafters of the last step; who does not run gives up its memory first."""
        self.scheduler.idle_models = (np.flatnonzero(~runs) + 1).tolist()
        self.scheduler.active_models = (np.flatnonzero(runs) + 1).tolist()


def _output(request: Request, done: Committed, drawn: Drawn, path: AcceptedPath) -> Output:
    most, told = request.sampling.logprobs, list[TokenLogprobs]()
    if most is not None:
        rows = dict(zip(drawn.tokens, drawn.logits, strict=True))
        told = [logprobs_of(rows[place], token, most) for place, token in zip(*path, strict=True)]
    return Output(request.name, done.tokens, done.text, told, done.finish, done.stop_reason)
