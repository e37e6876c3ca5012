"""What a controller is built from: the drafters, the engine's limits, and the settings that change while serving."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Values equal those of the API's `speculation.mode`."""

    CLOSED_LOOP = "ClosedLoop"
    STATIC = "Static"
    OFF = "Off"


class DraftPrefill(StrEnum):
    """Values equal those of the API's `speculation.draftPrefill`."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One entry of the draft pool, in the pool's order (order breaks ties)."""

    name: str
    neural: bool
    """True: a model with KV of its own, whose forward covers the whole batch; False: prompt lookup."""
    needs_whole_kv: bool = True
    """Of a neural drafter: its proposals over a hole in its KV are junk (a draft model). False: what a hole costs is
    measured (`HoleCost`; an EAGLE head)."""


@dataclass(frozen=True, slots=True)
class SLOTarget:
    name: str
    tpot_s: float
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class HotSettings:
    """May change under a running controller (`Controller.configure`)."""

    mode: Mode = Mode.CLOSED_LOOP
    draft_prefill: DraftPrefill = DraftPrefill.AUTO
    max_draft_tokens: int = 5
    slo_classes: tuple[SLOTarget, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """Fixed for the life of a controller.

    Raises ValueError for a negative draft length, two neural drafters or two drafters of one name.
    """

    drafters: tuple[DrafterSpec, ...]
    max_draft_tokens: int
    """The engine was built for this many; a hot value above it counts as this."""
    largest_graph_tokens: int | None = None
    """Batched tokens of the largest captured graph; None where the engine runs without graphs (CPU)."""
    hot: HotSettings = HotSettings()

    def __post_init__(self) -> None:
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) != len(names):
            raise ValueError(f"drafters: two entries share a name in {names}; give each drafter its own name")
        if sum(drafter.neural for drafter in self.drafters) > 1:
            raise ValueError("drafters: more than one neural drafter; this engine runs one, remove the others")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens: {self.max_draft_tokens} is negative; use 0 for no speculation")

    @property
    def neural(self) -> DrafterSpec | None:
        """The pool's neural drafter, if it has one."""
        return next((drafter for drafter in self.drafters if drafter.neural), None)
