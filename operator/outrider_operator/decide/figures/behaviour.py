"""How a service behaves: what it did in its windows, what its pods answer, and what the status says so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider_crds.conditions import find_condition
from outrider_crds.state import RuntimeState
from outrider_crds.status import Condition, ConditionType, SpeculativeServiceStatus

from outrider_operator.model import FigureWindows


@dataclass(frozen=True)
class Behaviour:
    windows: FigureWindows
    standing: SpeculativeServiceStatus
    states: Mapping[str, RuntimeState]
    """Name of a ready pod -> what it answered lately."""
    is_served: bool
    """True while a pod is ready."""

    @property
    def between_windows(self) -> bool:
        """True in the minute after the operator's start, which the pods served through: the figures so far stand."""
        return self.windows.current is None and not self.windows.error and self.is_served

    def standing_condition(self, kind: ConditionType) -> Condition | None:
        return find_condition(self.standing.conditions, kind)
