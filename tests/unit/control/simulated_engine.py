"""A synthetic engine with known costs and hazards that runs the real controller: synchronous, continuous batching.

It keeps the books that vLLM's scheduler and worker keep (who prefills, whose draft KV has holes), draws acceptance
from the true hazards, and lets noisy time pass. Tests change `world` and `load` while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from outrider_runtime.control.batch import (
    Batch,
    DraftPlan,
    ExecutionMode,
    RequestOutcome,
    RequestView,
    StepOutcome,
    VerifyPlan,
)
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, Shape, StepCost

TOKEN_BUDGET = 2048


@dataclass
class World:
    """The truth that the controller has to find out."""

    target: StepCost
    draft: dict[str, DrafterCost]
    hazard: dict[str, Callable[[int, int], float]]
    """(position from 0, request number) -> probability of acceptance."""
    hit: dict[str, float] = field(default_factory=dict)
    """Lookups: probability of having proposals at all."""
    noise: float = 0.05
    """Standard deviation of the log of every measured time."""
    overhead_s: float = 0.0002
    """Of the step's wall time, outside of target and draft."""
    hidden_s: float = 0.0
    """What a speculative step costs beyond that and no worker measures."""
    neural: str | None = None


@dataclass
class _Request:
    number: int
    prompt: int
    output: int
    context: int = 0
    produced: int = 0
    first_at: float = 0.0
    ready: bool = True
    """The draft's KV covers its context, so far without a hole."""
    proposed: int = 0
    asked: int = 0
    drafter: str | None = None

    @property
    def id(self) -> str:
        return f"request-{self.number}"


@dataclass(frozen=True)
class Record:
    """One step, as a test looks at it."""

    requests: int
    draft_tokens: int
    drafters: tuple[str | None, ...]
    verified: int
    tokens: int
    seconds: float
    ran_neural: bool
    verify_plan: VerifyPlan
    draft_plan: DraftPlan


class SimulatedEngine:
    """`load` requests run at any time; a finished one is replaced in the next step."""

    def __init__(self, world: World, controller: Controller, *, load: int, seed: int = 0,
                 prompt: int = 64, output: int = 96) -> None:  # fmt: skip
        self.world, self.controller, self.load = world, controller, load
        self.prompt, self.output = prompt, output
        self.now = 100.0
        self.rng = np.random.default_rng(seed)
        self.running: list[_Request] = []
        self.history: list[Record] = []
        self._number = 0

    def run(self, steps: int) -> list[Record]:
        start = len(self.history)
        for _ in range(steps):
            self.step()
        return self.history[start:]

    def step(self) -> None:
        self._admit()
        verify_plan = self.controller.plan_verify(self._batch([0] * len(self.running)))
        prefill = [0 if request.context else request.prompt for request in self.running]
        verified = list(verify_plan.lengths)
        for request, length in zip(self.running, verified, strict=True):
            assert 0 <= length <= max(0, min(request.proposed, request.output - request.produced - 1))
            request.proposed = length
        draft_plan = self.controller.plan_draft(self._batch(prefill))
        self._execute(verify_plan, draft_plan, prefill, verified)

    def _admit(self) -> None:
        self.running = [request for request in self.running if request.produced < request.output]
        while len(self.running) < self.load:
            self._number += 1
            output = max(2, int(self.output * self.rng.uniform(0.6, 1.4)))
            self.running.append(_Request(self._number, self.prompt, output))

    def _batch(self, prefill: list[int]) -> Batch:
        views = [
            RequestView(
                id=request.id, slo_class=None, context_tokens=request.context,
                prefill_tokens=tokens, prefill_left=0 if request.context or tokens else request.prompt,
                output_tokens=request.produced, remaining_tokens=request.output - request.produced,
                elapsed_s=self.now - request.first_at if request.first_at else 0.0,
                proposed=request.proposed, drafter=request.drafter, draft_ready=request.ready,
            )
            for request, tokens in zip(self.running, prefill, strict=True)
        ]  # fmt: skip
        return Batch(tuple(views), self.now, token_budget=TOKEN_BUDGET, free_kv_tokens=100_000)

    def _execute(self, verify_plan: VerifyPlan, plan: DraftPlan, prefill: list[int], verified: list[int]) -> None:
        shape = self._shape(prefill, verified)
        lengths = {length for length, tokens in zip(verified, prefill, strict=True) if tokens == 0}
        uniform = not any(prefill) and len(lengths) <= 1
        outcomes, tokens = self._accept(prefill, verified)
        target_s = self._noisy(self.world.target.seconds(shape))
        draft_s = {name: self._noisy(s) for name, s in self._draft_seconds(plan, shape).items()}
        step_s = target_s + sum(draft_s.values()) + self.world.overhead_s
        step_s += self.world.hidden_s if any(verified) else 0.0
        self.now += step_s
        self._propose(plan, prefill)
        outcome = StepOutcome(
            now=self.now, step_s=step_s, target_s=target_s, n_context=int(shape.n_context),
            n_batched=int(shape.n_batched), n_requests=len(self.running),
            mode=ExecutionMode.UNIFORM if uniform else ExecutionMode.RAGGED, tokens=tokens,
            verify_plan=verify_plan, draft_plan=plan, requests=tuple(outcomes), draft_s=draft_s,
            n_context_query=shape.n_context_query, prefill_tokens=sum(prefill),
        )  # fmt: skip
        self.controller.observe(outcome)
        self.history.append(
            Record(len(self.running), plan.draft_tokens, plan.drafters, sum(verified), tokens, step_s,
                   plan.run_neural, verify_plan, plan)
        )  # fmt: skip
        for request in self.running:
            if request.produced >= request.output:
                self.controller.forget(request.id)

    def _shape(self, prefill: list[int], verified: list[int]) -> Shape:
        queries = [tokens or 1 + length for tokens, length in zip(prefill, verified, strict=True)]
        contexts = [request.context for request in self.running]
        cross = sum(q * c for q, c in zip(queries, contexts, strict=True)) / 1000
        return Shape(sum(contexts), sum(queries), len(self.running), cross)

    def _accept(self, prefill: list[int], verified: list[int]) -> tuple[list[RequestOutcome], int]:
        outcomes: list[RequestOutcome] = []
        total = 0
        for request, chunk, length in zip(self.running, prefill, verified, strict=True):
            accepted = 0
            while accepted < length and self.rng.random() < self._hazard(request, accepted):
                accepted += 1
            if chunk:
                request.context, request.first_at = chunk, self.now
            else:
                request.context += 1 + accepted
                outcomes.append(RequestOutcome(request.id, None, request.drafter if request.asked else None,
                                               request.asked, request.proposed, length, accepted))  # fmt: skip
            produced = min(1 + accepted, request.output - request.produced)
            request.produced += produced
            total += produced
        return outcomes, total

    def _hazard(self, request: _Request, position: int) -> float:
        assert request.drafter is not None
        return self.world.hazard[request.drafter](position, request.number)

    def _draft_seconds(self, plan: DraftPlan, shape: Shape) -> dict[str, float]:
        seconds = {}
        neural = self.world.neural
        if plan.run_neural:
            assert neural is not None
            seconds[neural] = self.world.draft[neural].seconds(shape, max(1, plan.neural_tokens))
        for name in {name for name in plan.drafters if name is not None and name != neural}:
            asked = float(sum(name == one for one in plan.drafters))
            seconds[name] = self.world.draft[name].seconds(Shape(shape.n_context, asked, asked), plan.draft_tokens)
        return seconds

    def _propose(self, plan: DraftPlan, prefill: list[int]) -> None:
        for request, chunk, drafter in zip(self.running, prefill, plan.drafters, strict=True):
            request.ready = request.ready and plan.run_neural and (not chunk or plan.prefill_draft)
            hit = drafter is not None and self.rng.random() < self.world.hit.get(drafter, 1.0)
            request.drafter, request.asked = drafter, plan.draft_tokens if drafter is not None else 0
            request.proposed = plan.draft_tokens if hit else 0

    def _noisy(self, seconds: float) -> float:
        return seconds * math.exp(self.rng.normal(0, self.world.noise))


def goodput(records: list[Record]) -> float:
    """Tokens per second."""
    return sum(record.tokens for record in records) / sum(record.seconds for record in records)
