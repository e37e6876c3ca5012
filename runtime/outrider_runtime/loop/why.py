"""The last decisions for a human, each with what it weighed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from outrider_runtime.control.data.batch import Batch, Ints
from outrider_runtime.control.data.plans import DraftPlan, Purpose
from outrider_runtime.control.state import Weighed
from outrider_runtime.loop.arm_counts import ARM_NAMES, arms_in_words
from outrider_runtime.loop.control_loop import ControlLoop

KEPT = 40
LEAST_TOLD_S = 0.5e-6
"""Steps of the sizes that were seen take equally long where nothing else is known."""
BECAUSE = {
    Purpose.CHOICE: "",
    Purpose.PROBE: " to measure plain decoding",
    Purpose.EXPLORE: " to find out what a drafter is worth",
    Purpose.SLO: " because requests are behind their TPOT",
    Purpose.FIXED: " because nothing is to be chosen: a mode, a pin, or no drafter that can run",
}


class Decisions:
    """One of each report's, not of each step's."""

    def __init__(self, loop: ControlLoop) -> None:
        self._loop = loop
        self._lines: deque[str] = deque(maxlen=KEPT)

    def text(self, now: float) -> str:
        """Lines, the oldest first; the last decision before `now`, in Unix seconds, is added to them."""
        made = self._loop.last_decision()
        if made is not None:
            at = datetime.fromtimestamp(now, UTC).strftime("%H:%M:%S.%f")[:-4]
            self._lines.append(f"{at} {decision_sentence(list(self._loop.numbers), *made)}")
        return "".join(f"{line}\n" for line in self._lines)


def decision_sentence(names: Sequence[str], batch: Batch, plan: DraftPlan, weighed: Weighed | None) -> str:
    """names: of the drafters."""
    requests = "1 request" if len(batch) == 1 else f"{len(batch)} requests"
    if batch.arm is None:
        said = f"{requests}: {_what(names, plan)}{BECAUSE[plan.purpose]}"
    else:
        said = f"{requests} ({arms_in_words(batch.arm)}): {_by_arm(names, batch.arm, plan)}"
    return said if weighed is None or not names else f"{said}; {_weighed(names, weighed)}"


def _by_arm(names: Sequence[str], arms: Ints, plan: DraftPlan) -> str:
    """What each arm's requests are proposed. arms: (N,), as `Batch.arm`."""
    made = [
        f"{ARM_NAMES[of.arm]}: {_proposed(names, of.passes, plan.asked[:, arms == of.arm])}{BECAUSE[of.purpose]}"
        for of in plan.arms
    ]
    return "; ".join(made) or "k = 0"


def _what(names: Sequence[str], plan: DraftPlan) -> str:
    return _proposed(names, plan.passes, plan.asked)


def _proposed(names: Sequence[str], passes: Ints, order: Ints) -> str:
    """passes: (D,). order: (R, N), as `DraftPlan.asked`."""
    made = [
        f"k = {passes[number]} from {name} for {count}"
        for number, name in enumerate(names)
        if (count := int(np.count_nonzero((order == number).any(axis=0))))
    ]
    return ", ".join(made) or "k = 0"


def _weighed(names: Sequence[str], weighed: Weighed) -> str:
    brings = ", ".join(
        f"{name} {tokens:.2f} tokens after {1e6 * seconds:.0f} us of drafting"
        for name, tokens, seconds in zip(names, weighed.brings, weighed.draft_s, strict=True)
    )
    rate = f"{weighed.rate / 1000:.2g} tok/ms"
    return f"a verified token costs {_price(weighed)} {rate}; a request's first one brings: {brings}"


def _price(weighed: Weighed) -> str:
    if weighed.token_s < LEAST_TOLD_S:
        return "too little to tell from the steps so far, at"
    return f"{1e6 * weighed.token_s:.0f} us, or {weighed.token_s * weighed.rate:.2f} tokens at"
