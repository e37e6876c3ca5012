"""The last decisions as sentences, each with the costs and gains that it weighed (`/outrider/why`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from outrider_runtime.control.batch import Batch, Ints
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.control.state import Weighed
from outrider_runtime.loop.arm_counts import ARM_NAMES, arms_in_words
from outrider_runtime.loop.control_loop import ControlLoop

MAX_LINES = 40
MAX_NAMED_REQUESTS = 4
"""Requests that a line names: it stays readable, and a batch may have hundreds."""
MIN_REPORTED_COST_S = 0.5e-6
"""Smaller token costs are not printed: without more data, steps of all sizes seen so far seem equally long."""
BECAUSE = {
    Purpose.CHOICE: "",
    Purpose.PROBE: " to measure plain decoding",
    Purpose.EXPLORE: " to find out what a drafter is worth",
    Purpose.SLO: " because requests are behind their TPOT",
    Purpose.FIXED: " because nothing is chosen: mode Off or Static, a pinned length, or no drafter that can run",
}


class Decisions:
    """The last decisions: one for each report of the reporter, not for each step."""

    def __init__(self, loop: ControlLoop) -> None:
        self._loop = loop
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    def text(self, now_s: float) -> str:
        """Return the lines, the oldest first, after adding the last decision. now_s: Unix seconds."""
        decision = self._loop.last_decision()
        if decision is not None:
            time = datetime.fromtimestamp(now_s, UTC).strftime("%H:%M:%S.%f")[:-4]
            weighing = decision_sentence(list(self._loop.numbers), decision.batch, decision.plan, decision.weighed)
            self._lines.append(f"{time} {weighing}{_named(decision.requests)}")
        return "".join(f"{line}\n" for line in self._lines)


def _named(requests: Sequence[str]) -> str:
    """Return the ids of the first requests; they have the client's X-Request-Id in them."""
    if not requests:
        return ""
    more = len(requests) - MAX_NAMED_REQUESTS
    return f"; requests: {', '.join(requests[:MAX_NAMED_REQUESTS])}{f' and {more} more' if more > 0 else ''}"


def decision_sentence(names: Sequence[str], batch: Batch, plan: DraftPlan, weighed: Weighed | None) -> str:
    """Describe a decision. names: the drafters, by number."""
    requests = "1 request" if len(batch) == 1 else f"{len(batch)} requests"
    if batch.arm is None:
        sentence = f"{requests}: {_proposed(names, plan.passes, plan.drafter_order)}{BECAUSE[plan.purpose]}"
    else:
        sentence = f"{requests} ({arms_in_words(batch.arm)}): {_by_arm(names, batch.arm, plan)}"
    return sentence if weighed is None or not names else f"{sentence}; {_weighed(names, weighed)}"


def _by_arm(names: Sequence[str], arms: Ints, plan: DraftPlan) -> str:
    """Describe the plan of each arm. arms: (N,), as `Batch.arm`."""
    parts = [
        f"{ARM_NAMES[part.arm]}: {_proposed(names, part.passes, plan.drafter_order[:, arms == part.arm])}"
        f"{BECAUSE[part.purpose]}"
        for part in plan.arms
    ]
    return "; ".join(parts) or "k = 0"


def _proposed(names: Sequence[str], passes: Ints, order: Ints) -> str:
    """Describe the proposals. passes: (D,). order: (R, N), as `DraftPlan.drafter_order`."""
    parts = [
        f"k = {passes[number]} from {name} for {count}"
        for number, name in enumerate(names)
        if (count := int(np.count_nonzero((order == number).any(axis=0))))
    ]
    return ", ".join(parts) or "k = 0"


def _weighed(names: Sequence[str], weighed: Weighed) -> str:
    brings = ", ".join(
        f"{name} {tokens:.2f} tokens for {1e6 * seconds:.0f} us of drafting"
        for name, tokens, seconds in zip(names, weighed.brings, weighed.draft_s, strict=True)
    )
    return f"a verified token costs {_price(weighed)}; a request's first proposal is expected to bring: {brings}"


def _price(weighed: Weighed) -> str:
    rate = f"{round(weighed.rate, 1):g} tok/s"
    if weighed.token_s < MIN_REPORTED_COST_S:
        return f"too little to tell yet (lambda is {rate})"
    return f"{1e6 * weighed.token_s:.0f} us, or {weighed.token_s * weighed.rate:.2f} tokens (lambda is {rate})"
