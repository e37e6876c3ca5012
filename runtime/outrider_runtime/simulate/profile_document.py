"""A latency profile as the simulator ships and reads it: coefficients, and where they come from."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from outrider_crds.base import Model
from outrider_crds.profile import ExecutionMode, StepCost
from outrider_crds.spec import DraftMethod
from pydantic import Field

from outrider_runtime.control import batch
from outrider_runtime.control import costs as control


class Label(StrEnum):
    """How far to trust a profile; printed wherever its figures are."""

    MEASURED = "measured"
    """By outrider-profile, on the hardware."""
    FITTED = "fitted"
    """To step times that others have published."""
    DERIVED = "derived"
    """From weights, KV bytes and FLOPs against the data sheet."""


class DrafterProfile(Model):
    """What a drafter of one method costs beside the profile's target."""

    method: DraftMethod
    name: str = ""
    """The drafter that was measured, for a measured profile: it stands for the drafter of this name alone."""
    model: str = ""
    cost: StepCost
    autoregressive: bool
    first_pass: StepCost = StepCost()


class SimulationProfile(Model):
    name: str
    label: Label
    source: str
    """In a sentence: what the figures come from."""
    device: str
    gpus: Annotated[int, Field(ge=1)] = 1
    target: str
    costs: Annotated[dict[ExecutionMode, StepCost], Field(min_length=1)]
    drafters: list[DrafterProfile] = []
    kv_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens that the KV cache holds; absent: it is never full."""
    largest_graph_tokens: Annotated[int, Field(ge=1)] | None = None
    """Batched tokens from which the mode beyondGraph holds."""

    @property
    def hardware(self) -> str:
        return self.device if self.gpus == 1 else f"{self.gpus} x {self.device}"

    def target_costs(self) -> dict[batch.ExecutionMode, control.StepCost]:
        """In the controller's form."""
        return {batch.ExecutionMode(mode.value): control_cost(cost) for mode, cost in self.costs.items()}


def control_cost(cost: StepCost) -> control.StepCost:
    """The controller's form of a profile's coefficients."""
    return control.StepCost(**cost.model_dump())


def profile_cost(cost: control.StepCost) -> StepCost:
    """The other way round, to four significant digits: more would be noise."""
    names = StepCost.model_fields
    return StepCost(**{name: float(f"{getattr(cost, name):.4g}") for name in names})
