"""What the profiler and its engine process say to each other, one pickled value a message.

host:   Ready | Failed      once, when the engine has started or cannot
parent: Ask                 host: Visit | Failed      as often as the parent likes
parent: (hangs up)          host: (exits)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider_runtime.control.settings import Drafter
from outrider_runtime.profiler.grid import GridPoint, Limits, Pace


@dataclass(frozen=True, slots=True)
class Ready:
    limits: Limits
    pace: Pace
    device: str
    """As the engine names it."""
    engine_version: str
    drafters: Mapping[str, Drafter]
    """By name: those that it hosts, as the controller knows them in this engine."""


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str
    """CamelCase, as in `ProfilingFailure`."""
    message: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Measure steps of one shape, after `settle` that only warm up, until the two fastest agree."""

    point: GridPoint
    drafter: str | None
    """Who proposes at the end of each step; None: nobody."""
    steps: int
    """At least so many."""
    most_steps: int
    """However they disagree."""
    settle: int = 1
