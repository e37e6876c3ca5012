"""What the control loop has to know of a method: how its cost grows, and what it needs from an engine."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_runtime.control.settings import PROBABILITY_EDGES


@dataclass(frozen=True, slots=True)
class Method:
    """The fields are those of `control.settings.Drafter`."""

    passes: bool = False
    needs_kv: bool = False
    needs_hidden: bool = False
    confidence_edges: tuple[float, ...] = PROBABILITY_EDGES
    unsupported: str = ""
    """Why no engine hosts it, in a sentence; empty for a method that is served."""
