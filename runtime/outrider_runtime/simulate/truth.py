"""What is true in the simulated world, and the controller has to find out: acceptance, and what steps cost."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from outrider_runtime.control.batch import DraftPlan, ExecutionMode
from outrider_runtime.control.costs import DrafterCost, LatencyModel, Shape

Path = Sequence[float]
"""Probability that the target accepts positions 1..j of a chain; a longer chain keeps the last hazard."""
PathOf = Callable[[str, str | None, int, float], Path]
"""(drafter, SLO class, request number, now) -> path, at least as long as any chain of this engine."""

BUFFER = 4096


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """Hazards of one drafter, from a point in time on."""

    drafter: str
    hazards: tuple[float, ...]
    """Probability that position j is accepted, given that those before it were; the last one goes on."""
    slo_class: str | None = None
    """Of this class alone; None: of all that have no rule of their own."""
    from_s: float = 0.0


class AcceptanceRules:
    """Looks up paths; the latest rule that has begun holds, a class's own before the general one."""

    def __init__(self, rules: Sequence[AcceptanceRule], longest: int) -> None:
        self._tables: dict[tuple[str, str | None], tuple[list[float], list[Path]]] = {}
        for rule in sorted(rules, key=lambda one: one.from_s):
            starts, paths = self._tables.setdefault((rule.drafter, rule.slo_class), ([], []))
            starts.append(rule.from_s)
            paths.append(path_of(rule.hazards, longest))

    def __call__(self, drafter: str, slo_class: str | None, number: int, now: float) -> Path:  # noqa: ARG002
        table = self._tables.get((drafter, slo_class)) or self._tables[drafter, None]
        starts, paths = table
        return paths[max(0, bisect.bisect_right(starts, now) - 1)]


def path_of(hazards: Sequence[float], longest: int) -> Path:
    """Products of hazards for positions 1..longest."""
    chain = [hazards[min(position, len(hazards) - 1)] for position in range(longest)]
    return tuple(accumulate(chain, mul))


@dataclass
class World:
    """Costs and acceptance. Tests change the fields while an engine runs; the simulator does not."""

    latency: LatencyModel
    path: PathOf
    hit_rate: Mapping[str, float] = field(default_factory=dict)
    """Drafters that may find nothing to propose (prompt lookup): probability that they do propose."""
    neural: str | None = None
    """The drafter that is a model with KV of its own."""
    holes_matter: bool = True
    """Its proposals are junk where its KV has a hole (draft models: yes; EAGLE heads: no)."""
    largest_graph_tokens: int | None = None
    noise: float = 0.03
    """Standard deviation of the log of every measured time."""
    overhead_s: float = 0.0
    """Of a step's wall time, outside of target and draft."""
    hidden_s: float = 0.0
    """What a step that verifies costs beyond that and no worker measures."""

    def target_s(self, shape: Shape, mode: ExecutionMode) -> float:
        costs = self.latency.target
        order = (mode, ExecutionMode.RAGGED, ExecutionMode.UNIFORM, ExecutionMode.BEYOND_GRAPH)
        return next(costs[one] for one in order if one in costs).seconds(shape)

    def draft_s(self, plan: DraftPlan, shape: Shape, prefill_tokens: int) -> dict[str, float]:
        """Seconds of each drafter that runs at the end of a step whose target pass had `shape`."""
        seconds: dict[str, float] = {}
        if plan.run_neural and self.neural is not None:
            first = shape
            if not plan.prefill_draft:
                batched = shape.n_batched - prefill_tokens
                first = Shape(shape.n_context, batched, shape.n_requests, shape.n_context_query)
            seconds[self.neural] = self._cost(self.neural).seconds(first, max(1, plan.neural_tokens))
        if plan.draft_tokens:
            for name in dict.fromkeys(plan.drafters):  # in order: the draws of a seed must repeat
                if name is not None and name != self.neural:
                    asked = float(plan.drafters.count(name))
                    seconds[name] = self._cost(name).seconds(Shape(shape.n_context, asked, asked), plan.draft_tokens)
        return seconds

    def catch_up_s(self, shape: Shape) -> float:
        """Seconds of the neural draft's forward over tokens that it has not seen."""
        return self._cost(self.neural).seconds(shape, 1) if self.neural is not None else 0.0

    def _cost(self, name: str) -> DrafterCost:
        return self.latency.drafters[name]


class Chance:
    """Random numbers in blocks: one at a time from numpy would cost as much as a step's books."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.uniform = self._uniforms().__next__
        """() -> a number from [0, 1)."""
        self._normal = self._normals().__next__

    def noisy(self, seconds: float, deviation: float) -> float:
        """`seconds` times a log-normal factor."""
        return seconds * math.exp(deviation * self._normal()) if deviation else seconds

    def _uniforms(self) -> Iterator[float]:
        while True:
            yield from self._rng.random(BUFFER).tolist()

    def _normals(self) -> Iterator[float]:
        while True:
            yield from self._rng.standard_normal(BUFFER).tolist()
