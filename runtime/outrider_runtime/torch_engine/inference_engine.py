"""The engine: requests are added, and each step returns the tokens that some of them got.

    plan_verify -> schedule -> run -> plan_draft -> propose -> observe

One thread makes all calls.
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
from outrider_runtime.loop.request_table import End
from outrider_runtime.loop.shared_answers import AnswerSharing
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
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftOutcome, RequestStep, TorchDrafter, draft
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel
from outrider_runtime.torch_engine.planner import Planner
from outrider_runtime.torch_engine.target_pass import Drawn, draw_tokens, target_segment
from outrider_runtime.torch_engine.token_sampling import TokenLogprobs, report_logprobs
from outrider_runtime.torch_engine.tree import Tree


class Output(NamedTuple):
    """What one step adds to one request's answer."""

    request: str
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    """One for each token; empty when the request wants none."""
    finish: FinishReason | None
    stop_reason: int | str | None


class StepResult(NamedTuple):
    """What one step did for its requests."""

    outputs: list[Output]
    request_steps: list[RequestStep]
    """One for each request whose answer is not complete."""
    judged: list[JudgedTree]
    """The verified proposals of each request that drew a token."""


@dataclass(slots=True, eq=False)
class EngineModels:
    """The target and the drafters of one engine."""

    target: CachedModel
    drafters: Sequence[TorchDrafter]
    """The drafters, in the control loop's order. In the KV pool drafter i is model i + 1, and the target model 0."""
    kept_layers: tuple[int, ...] = ()
    """Layers of the target whose input the drafting heads read."""


class InferenceEngine:
    """Runs requests to their end, step by step, on one device."""

    def __init__(
        self, models: EngineModels, pool: KVPool, loop: ControlLoop, limits: SchedulerLimits, longest: int,
        clock: Callable[[], float] = time.monotonic, step_clock: StepClock | None = None,
    ) -> None:  # fmt: skip
        """longest: tokens that prompt and answer may have together. clock: seconds; step_clock: times device work."""
        self.longest = longest
        self.scheduler = BatchScheduler(pool, limits)
        self._models = models
        self._pool = pool
        self._clock = clock
        self._step_clock = step_clock or HostClock()
        self._planner = Planner(loop, self.scheduler, pool, longest, clock())
        self._sharing = AnswerSharing(loop.hosted)
        self._requests: dict[str, Request] = {}
        """Requests whose answer is not complete, by name."""
        self._set_idle(np.zeros(len(models.drafters), bool))
        pool.on_drop = self._on_drop
        self.scheduler.on_preempt = self._forget

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def free_kv_bytes(self) -> int:
        return self._pool.free_bytes

    @property
    def free_kv_tokens(self) -> int:
        """Tokens that fit into the free memory if the target and every drafter cache each of them."""
        return self._pool.free_tokens_of_all

    # -- requests come and go -----------------------------------------------------------------------------------

    def add(self, request: Request, arrived_at: float, extra_args: dict[str, object] | None = None) -> None:
        """Queue a request. arrived_at: Unix seconds. extra_args: may name the request's SLO class or its own SLO."""
        self._planner.register(request, arrived_at, extra_args)
        self._sharing.register(request.name, None, extra_args)
        self._requests[request.name] = request
        self.scheduler.add(request)

    def abort(self, name: str) -> None:
        """Drop a request whose client has left; do nothing when it has already ended."""
        if name in self._requests:
            self._planner.note_abort(name, self._clock())
            self._remove(name, is_complete=False)

    def _remove(self, name: str, *, is_complete: bool) -> None:
        """Free everything that an ended request held."""
        request = self._requests.pop(name)
        self._sharing.note_end(name, request.tokens[request.prompt_tokens :] if is_complete else None, self._clock())
        self.scheduler.finish(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Drop the request's KV in every model."""
        self._models.target.cache.forget(request.name)
        for drafter in self._models.drafters:
            drafter.forget(request.name)
        self._planner.forget(request.name)

    def _on_drop(self, holder: Holder) -> None:
        """Note that the pool took away a drafter's KV of one request."""
        number = holder.model - 1
        self._models.drafters[number].forget(holder.request)
        self._planner.kv_lost(number, holder.request)

    # -- a step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one step; the result is empty when no request can run."""
        plan = self._planner.plan_verify(self._clock())
        scheduled = self.scheduler.schedule(token_budget=plan.token_budget, admit=plan.admit)
        if not scheduled:
            return []
        began = self._step_clock.mark()
        target = self._models.target
        segments = [target_segment(scheduled_request) for scheduled_request in scheduled]
        hidden = target.run(segments, self._pool, self._models.kept_layers)
        draws = draw_tokens(scheduled, hidden.last, target.decoder)
        target_s = self._step_clock.seconds(began, self._step_clock.mark())
        step_number, order = self._planner.plan_draft(scheduled, plan)
        result = self._commit(scheduled, draws)
        committed = CommittedStep(result.request_steps, hidden.layer_inputs)
        report = self._propose(step_number, order, scheduled, committed)
        self._observe(report, result, target_s)
        return result.outputs

    def _commit(self, scheduled: Sequence[ScheduledRequest], draws: Sequence[Drawn | None]) -> StepResult:
        """Extend each answer by its accepted tokens, and keep the KV of known and accepted tokens only."""
        result = StepResult([], [], [])
        first_row = 0  # the request's first row in the step's hidden states
        for place, ((request, tokens, proposals), drawn) in enumerate(zip(scheduled, draws, strict=True)):
            known = tokens - proposals
            kept = list(range(known))
            is_complete = False
            if drawn is not None:
                path, committed = self._extend_answer(request, drawn)
                result.judged.append(JudgedTree(request.proposals, request.chosen, path))
                result.outputs.append(_output(request, committed, drawn, path))
                kept += [known + request.chosen.index(node) for node in path.places[1:]]
                is_complete = committed.finish is not None
            request.proposals = Tree()
            request.chosen = ()
            if not is_complete:
                rows = [first_row + token for token in kept]
                result.request_steps.append(RequestStep(request, place, request.computed, rows))
                self._keep_kv(request, kept)
            first_row += tokens
        return result

    def _extend_answer(self, request: Request, drawn: Drawn) -> tuple[AcceptedPath, Committed]:
        """Commit the accepted path; return it, cut at the end of the answer, and what was committed."""
        path = walk(request.proposals, drawn.tokens)
        committed = commit(request, path.tokens, self.longest)
        return path.cut(len(committed.tokens)), committed

    def _keep_kv(self, request: Request, kept: Sequence[int]) -> None:
        """Keep the KV of these tokens of the step. kept: indices among the request's own tokens of the step."""
        self._models.target.cache[request.name].keep(request.computed, kept)
        request.computed += len(kept)

    def _propose(
        self, step_number: int, order: Order, scheduled: Sequence[ScheduledRequest], committed: CommittedStep
    ) -> DraftOutcome:
        """Let the drafters propose, and cut proposals that are longer than what the answer may still get."""
        self._set_idle(order.runs)
        requests = [scheduled_request.request for scheduled_request in scheduled]
        shared = self._sharing.take([step.request.name for step in committed.request_steps], self._clock())
        if shared is not None:
            for drafter in self._models.drafters:
                drafter.share(shared)
        report = draft(self._models.drafters, step_number, order, requests, committed, self._step_clock)
        for request in (request_step.request for request_step in committed.request_steps):
            depth = self._planner.tokens_left(request) - 1  # one token is left for the bonus token
            request.proposals = request.proposals.within(depth)
        return report

    def _observe(self, report: DraftOutcome, result: StepResult, target_s: float) -> None:
        """Report the step to the control loop, and free what complete requests held."""
        delivered = [
            (output.request, len(output.tokens), End.COMPLETE if output.finish else None) for output in result.outputs
        ]
        self._planner.observe(report, delivered, target_s, verdicts(result.judged), self._clock())
        for output in result.outputs:
            if output.finish is not None:
                self._remove(output.request, is_complete=True)

    def _set_idle(self, runs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Name the drafters whose KV goes first when memory is short. runs: (D,), whether each drafter runs."""
        self.scheduler.idle_models = (np.flatnonzero(~runs) + 1).tolist()
        self.scheduler.active_models = (np.flatnonzero(runs) + 1).tolist()


def _output(request: Request, committed: Committed, drawn: Drawn, path: AcceptedPath) -> Output:
    logprobs = list[TokenLogprobs]()
    top_tokens = request.sampling.logprobs
    if top_tokens is not None:
        logits = dict(zip(drawn.tokens, drawn.logits, strict=True))  # place -> (vocabulary,)
        logprobs = [report_logprobs(logits[place], token, top_tokens) for place, token in zip(*path, strict=True)]
    return Output(
        request.name, committed.tokens, committed.text, logprobs, committed.finish, committed.stop_reason
    )  # fmt: skip
