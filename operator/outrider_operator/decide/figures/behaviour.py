"""The measured behaviour of a service: figures of its windows, reports of its pods, and the last status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider_crds.conditions import find_condition
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.status import Condition, ConditionType, SpeculativeServiceStatus

from outrider_operator.cluster_model import FigureWindows


@dataclass(frozen=True)
class MeasuredBehaviour:
    windows: FigureWindows
    last_status: SpeculativeServiceStatus
    states: Mapping[str, RuntimeState]
    """Name of a ready pod -> its last report."""
    is_served: bool
    """True while a pod is ready."""

    @property
    def between_windows(self) -> bool:
        """True in the first minute after the operator's start while pods serve: the last figures stay in the status."""
        return self.windows.current is None and not self.windows.error and self.is_served

    def last_condition(self, kind: ConditionType) -> Condition | None:
        return find_condition(self.last_status.conditions, kind)
