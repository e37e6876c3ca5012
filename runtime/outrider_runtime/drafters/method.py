"""A draft method: how its cost grows, what it needs from an engine, and reasons to refuse a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider_crds.spec import Backend

from outrider_runtime.drafters.draft_configs import ModelPair


def nothing_known(_models: ModelPair) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Method:
    """Properties of a method. The fields up to `needs_hidden` are those of `control.settings.Drafter`."""

    autoregressive: bool = False
    """Whether each proposed token costs a pass."""
    needs_kv: bool = False
    needs_hidden: bool = False
    beams: bool = False
    """Whether it can propose several tokens at a depth, for an engine that verifies trees."""
    unsupported: Mapping[Backend, str] = field(default_factory=dict)
    """Why an engine does not host the method, in a sentence, by engine; empty if every engine hosts it."""
    obstacle: Callable[[ModelPair], str] = nothing_known
    """Returns why a drafter cannot propose for its target, in a sentence; empty if no reason is known."""
