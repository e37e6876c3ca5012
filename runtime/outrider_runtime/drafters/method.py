"""What is known of a method: how its cost grows, what it needs from an engine, and what keeps a drafter from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider_crds.spec import Backend

from outrider_runtime.control.settings import PROBABILITY_EDGES
from outrider_runtime.drafters.draft_configs import Models


def nothing_known(_models: Models) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Method:
    """The fields up to `confidence_edges` are those of `control.settings.Drafter`."""

    passes: bool = False
    needs_kv: bool = False
    needs_hidden: bool = False
    confidence_edges: tuple[float, ...] = PROBABILITY_EDGES
    beams: bool = False
    """It can propose several tokens for a place, where the engine verifies trees."""
    unsupported: Mapping[Backend, str] = field(default_factory=dict)
    """Engine -> why it does not host the method, in a sentence; empty where every engine does."""
    obstacle: Callable[[Models], str] = nothing_known
    """Why a drafter with a model cannot propose for its target, in a sentence; empty when nothing is known against
    it."""
