"""What is known of a method: how its cost grows, what it needs from an engine, and what keeps a drafter from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider_runtime.control.settings import PROBABILITY_EDGES
from outrider_runtime.drafters.models import Models


def nothing_known(_models: Models) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Method:
    """The first fields are those of `control.settings.Drafter`."""

    passes: bool = False
    needs_kv: bool = False
    needs_hidden: bool = False
    confidence_edges: tuple[float, ...] = PROBABILITY_EDGES
    unsupported: str = ""
    """Why no engine hosts it, in a sentence; empty for a method that is served."""
    obstacle: Callable[[Models], str] = nothing_known
    """Why a drafter with a model cannot propose for its target, in a sentence; empty when nothing is known against
    it."""
