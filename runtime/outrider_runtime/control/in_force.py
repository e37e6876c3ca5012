"""What holds for the decisions of the moment: settings, suspensions and a pin."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Bools, Floats
from outrider_runtime.control.settings import DraftPrefill, HotSettings, Mode, Settings


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
    most_tokens: int
    silent: bool
    """Nobody proposes."""
    has_classes: bool
    tpots_s: Floats
    """By class; the last one, infinite, for none."""


def in_force(settings: Settings, suspended: Container[int], pinned: Pin | None) -> InForce:
    """suspended: numbers of drafters."""
    hot = settings.hot
    never = hot.draft_prefill is DraftPrefill.NEVER
    usable = [d not in suspended and not (one.reads and never) for d, one in enumerate(settings.drafters)]
    most = max(0, min(settings.max_draft_tokens, hot.max_draft_tokens))
    return InForce(
        hot=hot,
        pinned=pinned,
        usable=np.array(usable, dtype=bool),
        most_tokens=most,
        silent=(hot.mode is Mode.OFF or most == 0) if pinned is None else pinned.draft_tokens == 0,
        has_classes=bool(hot.slo_classes) and pinned is None,  # a pin measures the engine as it is
        tpots_s=np.array([*(one.tpot_s for one in hot.slo_classes), math.inf]),
    )


@dataclass(slots=True, eq=False)
class UnderWay:
    """What the step under way is expected to give and to take; only where classes ask."""

    expected: Floats
    """(S,): tokens beyond the bonus token, by slot."""
    drafts_s: float = 0.0
    """Seconds of the drafts at the end of a step, if they go on as they did."""
