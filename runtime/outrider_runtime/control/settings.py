"""What a controller is built from: the drafters, the engine's limits, and settings that change while serving. `InForce`
is what of these holds for the current decisions."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Bools, Floats


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
class Drafter:
    """One entry of the draft pool, in the pool's order, which breaks ties: its needs, and what its cost depends on."""

    name: str
    passes: bool = False
    """True: autoregressive, every token is a forward pass over the batch. False: one call for any length (prompt
    lookup, a block drafter)."""
    needs_kv: bool = False
    """It has a KV cache of its own, and its proposals for a request with a KV gap are junk (a draft model)."""
    needs_hidden: bool = False
    """It reads the target's hidden states: a step without it leaves a KV gap that cannot be fed later (an EAGLE
    head)."""
    kv_budget: int | None = None
    """Most context tokens of a request that a pass reads; None: all of them."""
    most_tokens: int | None = None
    """Largest draft length (the block of a block drafter); None: as large as the engine takes."""
    widest: int = 1
    """Most nodes at a depth of the trees that it can propose in this engine; 1: chains only."""

    @property
    def reads(self) -> bool:
        """Whether it must be fed committed tokens."""
        return self.needs_kv or self.needs_hidden

    @property
    def is_block(self) -> bool:
        """Whether it is a block drafter: one pass proposes all tokens, over a cache that is fed in every step, as a gap
        in it cannot be fed later."""
        return self.needs_kv and self.needs_hidden

    @property
    def stands_in(self) -> bool:
        """Whether it has a proposal for any context, and so for requests that a lookup finds nothing for."""
        return self.passes or self.is_block

    @property
    def is_target(self) -> bool:
        """Whether it is the target itself over a part of its context: each pass is a pass of the target, over those
        requests alone that use this drafter."""
        return self.kv_budget is not None and not self.reads


@dataclass(frozen=True, slots=True)
class SLOClass:
    name: str
    tpot_s: float
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class HotSettings:
    """Settings that may change under a running controller (`Controller.configure`)."""

    mode: Mode = Mode.CLOSED_LOOP
    draft_prefill: DraftPrefill = DraftPrefill.AUTO
    max_draft_tokens: int = 5
    slo_classes: tuple[SLOClass, ...] = ()
    """`Batch.slo_class` holds positions in this tuple."""
    admission: bool = True
    """Prompts and new requests are held back for classes with a tight TPOT."""
    order: tuple[str, ...] = ()
    """Names of drafters, in the order that mode Static prefers them in; missing ones follow in the pool's order."""
    arms: tuple[frozenset[str], frozenset[str]] | None = None
    """Names of the drafters that the stable and the candidate arm of a canary may use; None: no canary."""
    attempt: str = ""
    """Name of the canary's attempt: what its plans rest on starts again with another one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that are fixed for the life of a controller.

    Raises ValueError for a negative draft length, no slots, or two drafters of one name.
    """

    drafters: tuple[Drafter, ...]
    max_draft_tokens: int
    """Draft length that the engine was built for; a larger hot value counts as this."""
    slots: int
    """Slots that the engine gives to requests; `Batch.slot` is below it."""
    largest_graph_tokens: int | None = None
    """Batched tokens of the largest captured graph; None: the engine runs without graphs (CPU)."""
    hot: HotSettings = HotSettings()
    device_ranks: bool = False
    """The engine's device chooses the proposals to verify, by `VerifyPlan.device`."""
    scores_placeholders: bool = False
    """A step is scheduled before its drafters have run (asynchronous scheduling), so that the target scores every
    placeholder, whether it turns out to hold a proposal or not. Ignored with `device_ranks`."""

    def __post_init__(self) -> None:
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) != len(names):
            raise ValueError(f"drafters: two entries share a name in {names}; give each drafter its own name")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens: {self.max_draft_tokens} is negative; use 0 for no speculation")
        if self.slots < 1:
            raise ValueError(f"slots: {self.slots}; the engine must run at least one request")


class Pin(NamedTuple):
    """The tree that every request is proposed, whatever the loop would choose."""

    draft_tokens: int
    drafter: int
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class InForce:
    """What of the settings holds for the current decisions."""

    hot: HotSettings
    pinned: Pin | None
    """None: the loop chooses."""
    usable: Bools
    """(D,): drafters that may run."""
    needs_kv: Bools
    """(D,): see `Drafter`."""
    first: int
    """The usable drafter that mode Static prefers; 0 if none is usable."""
    most_tokens: int
    """Largest draft length."""
    is_silent: bool
    """No drafter proposes."""
    chooses: bool
    """Some drafter may run, and the loop chooses which."""
    has_classes: bool
    scores_placeholders: bool
    """See `Settings`."""
    tpots_s: Floats
    """Seconds per token of each class; the last one, infinite, for requests without a class."""


def fed_blocks(settings: Settings, force: InForce) -> Bools:
    """(D,): block drafters that are fed in every step, since feeding costs little and a KV gap would stay.

    A pin of a block drafter at length 0 feeds this drafter alone."""
    blocks = np.array([drafter.is_block for drafter in settings.drafters], dtype=bool)
    if force.pinned is not None:
        blocks &= np.arange(len(blocks)) == force.pinned.drafter
    elif force.is_silent:
        return np.zeros_like(blocks)
    return np.asarray(blocks & force.usable)


def in_force(settings: Settings, suspended: Container[int], pinned: Pin | None) -> InForce:
    """What of `settings` holds now. suspended: numbers of drafters that may not run."""
    hot = settings.hot
    never = hot.draft_prefill is DraftPrefill.NEVER
    usable = [d not in suspended and not (drafter.reads and never) for d, drafter in enumerate(settings.drafters)]
    most = max(0, min(settings.max_draft_tokens, hot.max_draft_tokens))
    is_silent = (hot.mode is Mode.OFF or most == 0) if pinned is None else pinned.draft_tokens == 0
    return InForce(
        hot=hot,
        pinned=pinned,
        usable=np.array(usable, dtype=bool),
        needs_kv=np.array([drafter.needs_kv for drafter in settings.drafters], dtype=bool),
        first=_first(settings, usable),
        most_tokens=most,
        is_silent=is_silent,
        chooses=pinned is None and hot.mode is Mode.CLOSED_LOOP and not is_silent and any(usable),
        has_classes=bool(hot.slo_classes) and pinned is None,  # a pin measures the engine as it is
        scores_placeholders=settings.scores_placeholders and not settings.device_ranks,
        tpots_s=np.array([*(drafter.tpot_s for drafter in hot.slo_classes), math.inf]),
    )


def _first(settings: Settings, usable: Sequence[bool]) -> int:
    place = {name: index for index, name in enumerate(settings.hot.order)}
    numbers = [number for number, is_usable in enumerate(usable) if is_usable]
    return min(numbers, key=lambda number: (place.get(settings.drafters[number].name, len(place)), number), default=0)
