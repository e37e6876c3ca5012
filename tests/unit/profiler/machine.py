"""A synthetic machine: it takes exactly what its coefficients say, times noise, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from outrider_runtime.control.cost.model import DrafterCost, Shape, StepCost
from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.grid import GridPoint, Limits, Pace
from outrider_runtime.profiler.protocol import Ask, Ready
from outrider_runtime.profiler.samples import Sample, Visit

TARGET = StepCost(
    per_context_token_s=2e-7,
    per_batched_token_s=2e-4,
    per_batched_token_above_knee_s=8e-4,
    knee_tokens=16,
    constant_s=15e-3,
)
EAGLE = DrafterCost(StepCost(per_batched_token_s=4e-5, constant_s=2e-3))
LOOKUP = DrafterCost(StepCost(per_request_s=2e-5, constant_s=5e-5), autoregressive=False)
LIMITS = Limits(max_requests=32, max_model_len=2048, max_draft_tokens=4, step_tokens=2048, kv_tokens=40_000)
PACE = Pace(step_s=0.015, token_s=0.001, prompt_token_s=0.001)


@dataclass
class Machine:
    """Measures what it is asked for and advances its clock by what that takes."""

    target: Callable[[Shape], float] = TARGET.seconds
    drafters: dict[str, DrafterCost] = field(default_factory=lambda: {"eagle": EAGLE, "lookup": LOOKUP})
    noise: float = 0.0
    """Noise adds up to this share, as neighbours do; it never takes away."""
    spikes: float = 0.0
    """Share of steps that take three times as long."""
    slows: float = 1.0
    """Each visit of a shape takes so many times as long as the one before: it never repeats itself at all."""
    suspended: dict[str, str] = field(default_factory=dict)
    dies_on: str | None = "nobody"
    """The engine dies as soon as this drafter is asked to propose."""
    now: float = 0.0
    asked: list[Ask] = field(default_factory=list)
    kv_budgets: dict[str, int] = field(default_factory=dict)
    """Tokens that a pass reads at most, of drafters that are the target over a part of its context."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def clock(self) -> float:
        return self.now

    def visit(self, ask: Ask) -> Visit:
        if ask.drafter == self.dies_on:
            raise ProfilingError("EngineFailed", "the engine process ended with code -11")
        before = sum(one.point == ask.point for one in self.asked)
        self.asked.append(ask)
        self._pace = self.slows**before
        steps = [self._step(ask) for _ in range(ask.settle + ask.steps)]
        return Visit(ask.point, tuple(steps[ask.settle :]), self.suspended.get(ask.drafter or "", ""))

    def wait_ready(self, _on_wait: Callable[[float], None]) -> Ready:
        hosted = {
            name: Drafter(name, passes=cost.autoregressive, kv_budget=self.kv_budgets.get(name))
            for name, cost in self.drafters.items()
        }
        return Ready(self.limits, PACE, "Synthetic 9000", "1.0", hosted)

    def _step(self, ask: Ask) -> Sample:
        shape = shape_of(ask.point)
        target_s = self.target(shape) * self._noise()
        draft_s = {}
        if ask.drafter in self.drafters and ask.drafter not in self.suspended:
            draft_s[ask.drafter] = self._drafting_s(self.drafters[ask.drafter], shape, ask.point) * self._noise()
        self.now += target_s + sum(draft_s.values())
        mode = ExecutionMode.RAGGED if ask.point.ragged else ExecutionMode.UNIFORM
        return Sample(shape, mode, target_s, ask.point.verify if ask.drafter else 0, ask.point.width, draft_s)

    def _drafting_s(self, cost: DrafterCost, shape: Shape, point: GridPoint) -> float:
        """Of a beam: each later pass runs over a node of every request and place of the beam."""
        later = Shape(shape.n_context, point.width * point.batch, point.batch, point.width * shape.n_context / 1000)
        return cost.seconds(shape, 1) + (point.verify - 1) * cost.autoregressive * cost.cost.seconds(later)

    def _noise(self) -> float:
        spike = 3.0 if self.rng.random() < self.spikes else 1.0
        return self._pace * spike * (1.0 + self.noise * self.rng.random())


def shape_of(point: GridPoint) -> Shape:
    context = point.batch * point.context
    requests = point.batch + (1 if point.prefill else 0)
    return Shape(context, point.batched, requests, point.context * (point.batched - point.prefill) / 1000)


def starter(machine: Machine):
    """Stands in for `remote.engine`: whatever is started is this machine."""

    @contextmanager
    def start(_backend, _launch):
        yield machine

    return start
