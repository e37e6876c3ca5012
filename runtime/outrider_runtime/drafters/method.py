"""What is known of a method: how its cost grows, what it needs from an engine, and what keeps a drafter from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider_crds.spec import Drafter

from outrider_runtime.control.settings import PROBABILITY_EDGES
from outrider_runtime.drafters.models import Models


def nothing_known(_models: Models) -> str:
    return ""


def unbounded(_drafter: Drafter, _page_tokens: int) -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class Method:
    """The fields up to `confidence_edges` are those of `control.settings.Drafter`."""

    passes: bool = False
    needs_kv: bool = False
    needs_hidden: bool = False
    kv_budget: Callable[[Drafter, int], int | None] = unbounded
    """Of a drafter, in an engine whose pages hold so many tokens."""
    confidence_edges: tuple[float, ...] = PROBABILITY_EDGES
    beams: bool = False
    """It can propose several tokens for a place, where the engine verifies trees."""
    unsupported: str = ""
    """Why no engine hosts it, in a sentence; empty for a method that is served."""
    obstacle: Callable[[Models], str] = nothing_known
    """Why a drafter with a model cannot propose for its target, in a sentence; empty when nothing is known against
    it."""
