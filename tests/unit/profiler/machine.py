"""A synthetic machine: it takes exactly what its coefficients say, times noise, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter
from outrider_runtime.control.step_times import DrafterCost, Shape, StepCost
from outrider_runtime.profiler.failures import ProfilingError
from outrider_runtime.profiler.grid import EngineLimits, GridPoint, StepPace
from outrider_runtime.profiler.host_protocol import Ready, VisitOrder
from outrider_runtime.profiler.step_samples import MeasuredStep, Visit

TARGET = StepCost(
    per_context_token_s=2e-7,
    per_batched_token_s=2e-4,
    per_batched_token_above_knee_s=8e-4,
    knee_tokens=16,
    constant_s=15e-3,
)
EAGLE = DrafterCost(StepCost(per_batched_token_s=4e-5, constant_s=2e-3))
LOOKUP = DrafterCost(StepCost(per_request_s=2e-5, constant_s=5e-5), autoregressive=False)
BLOCK = DrafterCost(
    StepCost(per_request_s=1e-4, constant_s=3e-3), False, StepCost(constant_s=2e-4, per_batched_token_s=3e-6)
)
LIMITS = EngineLimits(max_requests=32, max_model_len=2048, max_draft_tokens=4, step_tokens=2048, kv_tokens=40_000)
PACE = StepPace(step_s=0.015, token_s=0.001, prompt_token_s=0.001)


@dataclass
class Machine:
    """Measures the ordered shapes and advances its clock by the time that they take."""

    target: Callable[[Shape], float] = TARGET.seconds
    drafters: dict[str, DrafterCost] = field(default_factory=lambda: {"eagle": EAGLE, "lookup": LOOKUP, "block": BLOCK})
    noise: float = 0.0
    """Largest share that noise adds to a time; it never subtracts."""
    spikes: float = 0.0
    """Share of steps that take three times as long."""
    slows: float = 1.0
    """Time of a visit / time of the visit of that shape before; above 1 no shape ever repeats."""
    suspended: dict[str, str] = field(default_factory=dict)
    dies_on: str | None = "no drafter"
    """The engine dies when this drafter is to propose."""
    time_s: float = 0.0
    orders: list[VisitOrder] = field(default_factory=list)
    kv_budgets: dict[str, int] = field(default_factory=dict)
    """Most context tokens that a pass reads, for drafters that are the target over a window."""
    limits: EngineLimits = LIMITS

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def clock(self) -> float:
        return self.time_s

    def visit(self, order: VisitOrder) -> Visit:
        if order.drafter == self.dies_on:
            raise ProfilingError("EngineFailed", "the engine process ended with code -11")
        visits = sum(earlier.point == order.point for earlier in self.orders)
        self.orders.append(order)
        self._pace = self.slows**visits
        steps = [self._step(order) for _ in range(order.settle + order.steps)]
        return Visit(order.point, tuple(steps[order.settle :]), self.suspended.get(order.drafter or "", ""))

    def wait_ready(self, _on_wait: Callable[[float], None]) -> Ready:
        hosted = {
            name: Drafter(name, passes=cost.autoregressive, kv_budget=self.kv_budgets.get(name))
            for name, cost in self.drafters.items()
        }
        return Ready(self.limits, PACE, "Synthetic 9000", "1.0", hosted)

    def _step(self, ask: VisitOrder) -> MeasuredStep:
        shape = shape_of(ask.point)
        target_s = self.target(shape) * self._noise()
        draft_s = {}
        if ask.drafter in self.drafters and ask.drafter not in self.suspended:
            draft_s[ask.drafter] = self._drafting_s(self.drafters[ask.drafter], shape, ask.point) * self._noise()
        self.time_s += target_s + sum(draft_s.values())
        mode = ExecutionMode.VARLEN if ask.point.is_varlen else ExecutionMode.UNIFORM
        return MeasuredStep(shape, mode, target_s, ask.point.verify if ask.drafter else 0, ask.point.width, draft_s)

    def _drafting_s(self, cost: DrafterCost, shape: Shape, point: GridPoint) -> float:
        """Return the drafter's seconds; each later pass of a beam runs over `width` nodes of every request."""
        if not cost.autoregressive:
            return cost.seconds(shape, point.verify)
        later = Shape(shape.n_context, point.width * point.batch, point.batch, point.width * shape.n_context / 1000)
        return cost.seconds(shape, 1) + (point.verify - 1) * cost.cost.seconds(later)

    def _noise(self) -> float:
        spike = 3.0 if self.rng.random() < self.spikes else 1.0
        return self._pace * spike * (1.0 + self.noise * self.rng.random())


def shape_of(point: GridPoint) -> Shape:
    context = point.batch * point.context
    requests = point.batch + (1 if point.prefill else 0)
    return Shape(context, point.batched, requests, point.context * (point.batched - point.prefill) / 1000)


def starter(machine: Machine):
    """Stands in for `remote.engine`: returns this machine, whatever the launch is."""

    @contextmanager
    def start(_backend, _launch):
        yield machine

    return start
