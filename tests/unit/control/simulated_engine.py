"""The simulator's engine as the controller's tests use it: a fixed number of requests at any time, known hazards.

Tests change `world`, `load` and `output` while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
from outrider_runtime.control.batch import DraftPlan, ExecutionMode, StepOutcome, VerifyPlan
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, LatencyModel, StepCost
from outrider_runtime.simulate import truth
from outrider_runtime.simulate.books import Finished
from outrider_runtime.simulate.engine import Engine
from outrider_runtime.simulate.scheduling import Limits
from outrider_runtime.simulate.workload import Arrival

LONGEST = 16
LIMITS = Limits(token_budget=2048, kv_tokens=100_000)
Hazard = Callable[[int, int], float]
"""(position from 0, request number) -> probability of acceptance."""


class World(truth.World):
    """The simulator's world, from a target's cost and from hazards by position and request."""

    def __init__(
        self, target: StepCost, draft: dict[str, DrafterCost], hazard: dict[str, Hazard],
        hit: dict[str, float] | None = None, *, noise: float = 0.05, overhead_s: float = 0.0002,
        hidden_s: float = 0.0, neural: str | None = None,
    ) -> None:  # fmt: skip
        self.target, self.draft, self.hazard, self.hit = target, draft, hazard, {} if hit is None else hit
        latency = LatencyModel(dict.fromkeys(ExecutionMode, target), draft)
        super().__init__(latency, self._path, self.hit, neural, noise=noise, overhead_s=overhead_s, hidden_s=hidden_s)

    def _path(self, drafter: str, _slo_class: str | None, number: int, _now: float) -> truth.Path:
        return tuple(accumulate((self.hazard[drafter](position, number) for position in range(LONGEST)), mul))


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
    """`load` requests run at any time; a finished one is replaced in the next step. `classes`: the SLO class of each
    request, by number."""

    def __init__(self, world: World, controller: Controller, *, load: int, seed: int = 0,
                 prompt: int = 64, output: int = 96,
                 classes: Callable[[int], str | None] = lambda _number: None) -> None:  # fmt: skip
        self.world, self.controller, self.load = world, controller, load
        self._classes = classes
        self._number = 0
        self._prompt, self.output = prompt, output
        self._rng = np.random.default_rng(seed)
        self._engine = Engine(
            world, controller, self, LIMITS, np.random.default_rng([seed, 1]), start_s=100.0, listener=self._note
        )
        self._history: list[Record] = []

    def run(self, steps: int) -> list[Record]:
        start = len(self._history)
        for _ in range(steps):
            self._engine.advance()
        return self._history[start:]

    def due(self, now_s: float, active: int) -> Sequence[Arrival]:
        return [self._arrival(now_s) for _ in range(self.load - active)]

    @property
    def finished(self) -> list[Finished]:
        return self._engine.finished

    def _arrival(self, now_s: float) -> Arrival:
        self._number += 1
        return Arrival(now_s, self._prompt, self._draw_output(), self._classes(self._number))

    def next_at_s(self) -> float | None:
        return None

    def _draw_output(self) -> int:
        return max(2, int(self.output * self._rng.uniform(0.6, 1.4)))

    def _note(self, outcome: StepOutcome) -> None:
        plan = outcome.draft_plan
        self._history.append(
            Record(
                requests=outcome.n_requests,
                draft_tokens=plan.draft_tokens,
                drafters=plan.drafters,
                verified=sum(request.verified for request in outcome.requests),
                tokens=outcome.tokens,
                seconds=outcome.step_s,
                ran_neural=plan.run_neural,
                verify_plan=outcome.verify_plan,
                draft_plan=plan,
            )
        )


def goodput(records: list[Record]) -> float:
    """Tokens per second."""
    return sum(record.tokens for record in records) / sum(record.seconds for record in records)
