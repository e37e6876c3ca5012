"""Step times from the coefficients of a latency profile, as `outrider-profile` measured and fitted them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import DrafterCost, Shape, StepCost

if TYPE_CHECKING:
    from outrider_runtime.simulate.worlds.world import Pass


@dataclass(frozen=True, slots=True)
class ProfiledTarget:
    costs: Mapping[ExecutionMode, StepCost]
    """Costs of at least one mode; another mode replaces a missing work."""
    graph_tokens: int | None

    def ms(self, work: Pass, tokens: int) -> float:  # noqa: ARG002
        """Return milliseconds of a pass; the measured times include padding."""
        cost = self.costs.get(self._mode(work)) or next(iter(self.costs.values()))
        return 1e3 * cost.seconds(_shape(work))

    def _mode(self, work: Pass) -> ExecutionMode:
        if self.graph_tokens is not None and work.tokens > self.graph_tokens:
            return ExecutionMode.BEYOND_GRAPH
        return ExecutionMode.UNIFORM if work.uniform and not work.prompts else ExecutionMode.VARLEN


@dataclass(frozen=True, slots=True)
class ProfiledDrafter:
    cost: DrafterCost

    def ms(self, first: Pass, passes: int, width: int = 1) -> float:
        return 1e3 * self.cost.seconds(_shape(first), passes, width)


def target(part: Mapping[str, Any], graph_tokens: int | None) -> ProfiledTarget:
    return ProfiledTarget({ExecutionMode(mode): StepCost(**cost) for mode, cost in part["costs"].items()}, graph_tokens)


def drafter(part: Mapping[str, Any]) -> ProfiledDrafter:
    return ProfiledDrafter(DrafterCost(StepCost(**part["cost"]), part["passes"], StepCost(**part["firstPass"])))


def _shape(work: Pass) -> Shape:
    prompts = sum(chunk for chunk, _ in work.prompts)
    cached = work.requests * work.context
    query = cached * work.queries + sum(chunk * prefix for chunk, prefix in work.prompts)
    return Shape(
        n_context=cached + sum(prefix for _, prefix in work.prompts),
        n_batched=work.tokens,
        n_requests=work.requests + len(work.prompts),
        n_context_query=query / 1000,
        n_prompt=prompts,
    )
