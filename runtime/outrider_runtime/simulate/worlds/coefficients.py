"""A latency profile's coefficients as step times: what `outrider-profile` measured and fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider_runtime.control.cost.model import DrafterCost, Shape, StepCost
from outrider_runtime.control.data.plans import ExecutionMode

if TYPE_CHECKING:
    from outrider_runtime.simulate.worlds.world import Pass


@dataclass(frozen=True, slots=True)
class ProfiledTarget:
    costs: Mapping[ExecutionMode, StepCost]
    """At least one mode; another one stands for a mode that is missing."""
    graph_tokens: int | None

    def ms(self, one: Pass, tokens: int) -> float:  # noqa: ARG002
        """Padding is in what was measured."""
        cost = self.costs.get(self._mode(one)) or next(iter(self.costs.values()))
        return 1e3 * cost.seconds(_shape(one))

    def _mode(self, one: Pass) -> ExecutionMode:
        if self.graph_tokens is not None and one.tokens > self.graph_tokens:
            return ExecutionMode.BEYOND_GRAPH
        return ExecutionMode.UNIFORM if one.even and not one.prompts else ExecutionMode.RAGGED


@dataclass(frozen=True, slots=True)
class ProfiledDrafter:
    cost: DrafterCost

    def ms(self, first: Pass, passes: int, width: int = 1) -> float:
        return 1e3 * self.cost.seconds(_shape(first), passes, width)


def target(part: Mapping[str, Any], graph_tokens: int | None) -> ProfiledTarget:
    return ProfiledTarget({ExecutionMode(mode): StepCost(**cost) for mode, cost in part["costs"].items()}, graph_tokens)


def drafter(part: Mapping[str, Any]) -> ProfiledDrafter:
    return ProfiledDrafter(DrafterCost(StepCost(**part["cost"]), part["passes"], StepCost(**part["firstPass"])))


def _shape(one: Pass) -> Shape:
    prompts = sum(chunk for chunk, _ in one.prompts)
    cached = one.requests * one.context
    query = cached * one.queries + sum(chunk * prefix for chunk, prefix in one.prompts)
    return Shape(
        n_context=cached + sum(prefix for _, prefix in one.prompts),
        n_batched=one.tokens,
        n_requests=one.requests + len(one.prompts),
        n_context_query=query / 1000,
        n_prompt=prompts,
    )
