"""What a controller is built from: the drafters, the engine's limits, and the settings that change while serving; and
what of it holds for the decisions of the moment."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.data.batch import Bools, Floats


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


PROBABILITY_EDGES = (-1.4, -0.4, 0.4, 1.1, 1.7, 2.6, 4.0)
"""Log-odds of a proposed token that part a model's confidences: 0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98."""
MATCH_EDGES = (1.5, 2.5, 3.5, 5.5, 8.5, 16.5, 32.5)
"""Tokens of a match that part a lookup's confidences."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """One entry of the draft pool, in the pool's order (order breaks ties): what it needs, and how its cost grows."""

    name: str
    passes: bool = False
    """True: every token is a forward pass over the batch; False: one call however long (prompt lookup)."""
    needs_kv: bool = False
    """It has a cache of its own and proposes junk for a request whose cache has a hole (a draft model)."""
    needs_hidden: bool = False
    """It reads the target's hidden states: a step without it leaves a gap that cannot be closed (an EAGLE head)."""
    kv_budget: int | None = None
    """Tokens of a request that a pass reads at most; None: all of them."""
    confidence_edges: tuple[float, ...] = PROBABILITY_EDGES
    """Seven rising values of its confidence, between which acceptance is counted apart."""
    most_tokens: int | None = None
    """Tokens that it proposes for a request at most (the block of a block drafter); None: as many as the engine
    takes."""
    widest: int = 1
    """Most nodes at a depth of the trees that it can propose in this engine; 1: chains only."""

    @property
    def reads(self) -> bool:
        """It must be fed committed tokens."""
        return self.needs_kv or self.needs_hidden

    @property
    def is_block(self) -> bool:
        """One pass proposes all tokens, over a cache that is fed in every step: a gap in it cannot be closed."""
        return self.needs_kv and self.needs_hidden

    @property
    def stands_in(self) -> bool:
        """It has a proposal for any context, and so for requests that a lookup finds nothing for."""
        return self.passes or self.is_block

    @property
    def is_target(self) -> bool:
        """It is the target itself over a part of its context: each pass is one of the target's, over those requests
        alone that ask."""
        return self.kv_budget is not None and not self.reads


@dataclass(frozen=True, slots=True)
class SLOClass:
    name: str
    tpot_s: float
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class HotSettings:
    """May change under a running controller (`Controller.configure`)."""

    mode: Mode = Mode.CLOSED_LOOP
    draft_prefill: DraftPrefill = DraftPrefill.AUTO
    max_draft_tokens: int = 5
    slo_classes: tuple[SLOClass, ...] = ()
    """`Batch.slo_class` holds positions in this tuple."""
    admission: bool = True
    """Prompts and new requests are held back for classes with a tight TPOT."""
    order: tuple[str, ...] = ()
    """Names of drafters, the one that mode Static asks first; those that it leaves out follow in the pool's order."""
    arms: tuple[frozenset[str], frozenset[str]] | None = None
    """Names of the drafters that the stable and the candidate arm of a canary may ask; None: no canary."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Fixed for the life of a controller.

    Raises ValueError for a negative draft length, no slots, or two drafters of one name.
    """

    drafters: tuple[Drafter, ...]
    max_draft_tokens: int
    """The engine was built for this many; a hot value above it counts as this."""
    slots: int
    """Slots that the engine gives to requests; `Batch.slot` is below it."""
    largest_graph_tokens: int | None = None
    """Batched tokens of the largest captured graph; None where the engine runs without graphs (CPU)."""
    hot: HotSettings = HotSettings()
    device_ranks: bool = False
    """Whether the engine's device chooses the proposals that are verified, by `VerifyPlan.device`."""
    scores_placeholders: bool = False
    """Whether a step is scheduled before its drafters have run, so that the target scores each scheduled place, whether
    it holds a proposal or not (asynchronous scheduling). Not where the device chooses."""

    def __post_init__(self) -> None:
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) != len(names):
            raise ValueError(f"drafters: two entries share a name in {names}; give each drafter its own name")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens: {self.max_draft_tokens} is negative; use 0 for no speculation")
        if self.slots < 1:
            raise ValueError(f"slots: {self.slots}; the engine must run at least one request")


class Pin(NamedTuple):
    """What every request is proposed."""

    draft_tokens: int
    drafter: int
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class InForce:
    hot: HotSettings
    pinned: Pin | None
    """None: choose."""
    usable: Bools
    """(D,): drafters that may run."""
    needs_kv: Bools
    """(D,): see `Drafter`."""
    first: int
    """The usable drafter that mode Static asks; 0 where none is usable."""
    most_tokens: int
    silent: bool
    """Nobody proposes."""
    chooses: bool
    """Somebody may run, and the loop says who."""
    has_classes: bool
    scores_placeholders: bool
    """See `Settings`."""
    tpots_s: Floats
    """By class; the last one, infinite, for none."""


def fed_blocks(settings: Settings, force: InForce) -> Bools:
    """(D,): block drafters that are fed in every step, as feeding costs little and a gap stays.

    A pin of a block drafter at length 0 feeds it alone."""
    blocks = np.array([drafter.is_block for drafter in settings.drafters], dtype=bool)
    if force.pinned is not None:
        blocks &= np.arange(len(blocks)) == force.pinned.drafter
    elif force.silent:
        return np.zeros_like(blocks)
    return np.asarray(blocks & force.usable)


def in_force(settings: Settings, suspended: Container[int], pinned: Pin | None) -> InForce:
    """suspended: numbers of drafters."""
    hot = settings.hot
    never = hot.draft_prefill is DraftPrefill.NEVER
    usable = [d not in suspended and not (one.reads and never) for d, one in enumerate(settings.drafters)]
    most = max(0, min(settings.max_draft_tokens, hot.max_draft_tokens))
    silent = (hot.mode is Mode.OFF or most == 0) if pinned is None else pinned.draft_tokens == 0
    return InForce(
        hot=hot,
        pinned=pinned,
        usable=np.array(usable, dtype=bool),
        needs_kv=np.array([one.needs_kv for one in settings.drafters], dtype=bool),
        first=_first(settings, usable),
        most_tokens=most,
        silent=silent,
        chooses=pinned is None and hot.mode is Mode.CLOSED_LOOP and not silent and any(usable),
        has_classes=bool(hot.slo_classes) and pinned is None,  # a pin measures the engine as it is
        scores_placeholders=settings.scores_placeholders and not settings.device_ranks,
        tpots_s=np.array([*(one.tpot_s for one in hot.slo_classes), math.inf]),
    )


def _first(settings: Settings, usable: Sequence[bool]) -> int:
    place = {name: index for index, name in enumerate(settings.hot.order)}
    numbers = [number for number, is_usable in enumerate(usable) if is_usable]
    return min(numbers, key=lambda number: (place.get(settings.drafters[number].name, len(place)), number), default=0)
