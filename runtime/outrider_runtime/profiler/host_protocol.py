"""Messages between the profiler and its engine process, one pickled value each.

host:   Ready | EngineFailure          once, when the engine has started or has failed to
parent: VisitOrder                     host: Visit | EngineFailure      any number of times
parent: (closes the connection)        host: (exits)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider_runtime.control.settings import Drafter
from outrider_runtime.profiler.grid import EngineLimits, GridPoint, StepPace


@dataclass(frozen=True, slots=True)
class Ready:
    """Facts of an engine that has started."""

    limits: EngineLimits
    pace: StepPace
    device: str
    """The engine's name of the device."""
    engine_version: str
    drafters: Mapping[str, Drafter]
    """Drafters that the engine has loaded, by name, with their properties in this engine."""


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The engine failed."""

    reason: str
    """Reason of the `ProfilingFailure`, in CamelCase."""
    message: str


@dataclass(frozen=True, slots=True)
class VisitOrder:
    """An order to measure steps of one shape until the two fastest agree."""

    point: GridPoint
    drafter: str | None
    """Drafter that proposes at the end of each step; None: no drafter."""
    steps: int
    """Fewest steps to measure."""
    most_steps: int
    """Most steps to measure, even if no two agree."""
    settle: int = 1
    """Warm-up steps, not measured."""
