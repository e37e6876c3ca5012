"""A choice that holds for a few steps: hardly anything is known better after one step more, and deciding takes time.

In the step of a small model a decision is a few percent of the time, as the model's weights have pushed all that it
touches out of the caches. So evidence is counted when a choice is due, and until the next one both plans rest on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from outrider_runtime.control.batch import Batch, DraftPlan

MANY_REQUESTS = 32
KEEP_STEPS, KEEP_STEPS_LOOKUP, KEEP_STEPS_PLAIN = 5, 2, 7
"""How many steps repeat a choice of drafters and draft length while the same requests decode. Whether a lookup finds
something shows at once, and with few requests that is much. Where nothing is proposed only the costs can change, and
they change slowly."""

Paying = Mapping[str | None, Sequence[int]]
"""Request -> by drafter, how many of its proposals are worth verifying."""


class KeptChoice:
    def __init__(self) -> None:
        self._plan: DraftPlan | None = None
        self._drafters: dict[str | None, str | None] = {}
        self._paying: Paying = {}
        self._since = 0

    def keep(self, plan: DraftPlan, requests: Sequence[str | None], paying: Paying) -> None:
        """`plan` is the choice for `requests`. paying: empty where that is to be looked at in each step."""
        self._plan, self._drafters = plan, dict(zip(requests, plan.drafters, strict=True))
        self._paying = paying

    def drop(self) -> None:
        self._plan, self._paying = None, {}

    def passed(self) -> int:
        """Steps since the last choice; a new one is made."""
        passed, self._since = 1 + self._since, 0
        return passed

    def plan(self, batch: Batch, shortest: int) -> DraftPlan | None:
        """The last choice once more; None where a new one is due. shortest: tokens that each request must have left."""
        kept = self._plan
        if kept is None or self._since >= _steps_to_keep(kept):
            return None
        known, neural = self._drafters.get, kept.neural_tokens > 0
        found: list[str | None] = []
        for view in batch.requests:
            drafter = known(view.id, "")
            if drafter == "" or view.prefill_tokens or view.remaining_tokens <= shortest:
                return None
            if neural and not view.draft_ready:
                return None
            found.append(drafter)
        drafters = tuple(found)
        if kept.draft_tokens > 0 and not any(drafters):
            return None
        self._since += 1
        return kept if drafters == kept.drafters else dataclasses.replace(kept, drafters=drafters)

    def lengths(self, batch: Batch, index: Mapping[str, int]) -> tuple[int, ...] | None:
        """How many proposals each request verifies, as the choice saw it; None where that has to be looked at anew: a
        new request, a prompt in the step, or no room. index: drafter -> its number."""
        if not self._paying:
            return None
        lengths = []
        for view in batch.requests:
            paying = self._paying.get(view.id)
            if paying is None or view.prefill_tokens or view.prefill_left:
                return None
            number = index.get(view.drafter or "") if view.proposed else None
            most = 0 if number is None else min(view.proposed, paying[number])
            lengths.append(max(0, min(most, view.remaining_tokens - 1)))
        fits = sum(lengths) + len(lengths) <= min(batch.token_budget, batch.free_kv_tokens)
        return tuple(lengths) if fits else None


def _steps_to_keep(plan: DraftPlan) -> int:
    if plan.draft_tokens == 0:
        return KEEP_STEPS_PLAIN
    looks_up = plan.neural_tokens == 0 and len(plan.drafters) < MANY_REQUESTS
    return KEEP_STEPS_LOOKUP if looks_up else KEEP_STEPS
