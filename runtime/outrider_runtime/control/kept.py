"""A choice that holds for a few steps: hardly anything is known better after one step more, and deciding takes time.

In the step of a small model a decision is a few percent of the time, as the model's weights have pushed all that it
touches out of the caches. So evidence is counted when a choice is due, and until the next one both plans rest on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from outrider_runtime.control.batch import OF_THIS_STEP, Batch, DraftPlan

MANY_REQUESTS = 32
KEEP_STEPS, KEEP_STEPS_LOOKUP, KEEP_STEPS_PLAIN = 5, 2, 7
"""How many steps repeat a choice of drafters and draft length while the same requests decode. Whether a lookup finds
something shows at once, and with few requests that is much. Where nothing is proposed only the costs can change, and
they change slowly."""

SMALLER = 7 / 8
"""A batch of less than this share of what it was may well have another best choice, and one with less than this share
of the requests that it was made for."""

Paying = Mapping[str | None, Sequence[Sequence[int]]]
"""Request -> by drafter, how many of its proposals are worth verifying in any case, and how many may be."""
_Waiting = tuple[str, str | None, int]
"""Request, who proposed, and how many proposals it may verify."""


class KeptChoice:
    def __init__(self) -> None:
        self._plan: DraftPlan | None = None
        self._drafters: dict[str | None, str | None] = {}
        self._paying: Paying = {}
        self._verified: tuple[list[_Waiting], tuple[int, ...]] = ([], ())
        self._since = 0
        self._in_tow = self._in_general = False

    def keep(
        self, plan: DraftPlan, requests: Sequence[str | None], paying: Paying, *, in_tow: bool = False,
        in_general: bool = False,
    ) -> None:  # fmt: skip
        """`plan` is the choice for `requests`. paying: empty where that is to be looked at in each step. in_tow:
        prompts that the neural draft would have to read had a say in it, so it holds for steps with prompts only.
        in_general: it was made for requests most of which have room for proposals, so if none pays it holds for others
        too."""
        self._in_tow, self._in_general = in_tow, in_general
        self._plan, self._drafters = plan, dict(zip(requests, plan.drafters, strict=True))
        self._paying, self._verified = paying, ([], ())

    def drop(self) -> None:
        self._plan, self._paying, self._verified = None, {}, ([], ())

    def passed(self) -> int:
        """Steps since the last choice; a new one is made."""
        passed, self._since = 1 + self._since, 0
        return passed

    def plan(self, batch: Batch, *, skips_prompts: bool) -> DraftPlan | None:
        """The last choice once more; None where a new one is due. skips_prompts: whatever were chosen, the neural draft
        would not read the prompts of this step."""
        kept = self._plan
        if kept is None or self._since >= _steps_to_keep(kept):
            return None
        if self._in_tow and not any(view.prefill_tokens for view in batch.requests):
            return None
        if skips_prompts and _proposes_nothing(kept) and self._in_general:
            return self._nothing(kept, len(batch.requests))
        known, neural = self._drafters.get, kept.neural_tokens > 0
        found: list[str | None] = []
        room = newcomers = 0
        for view in batch.requests:
            drafter, left = known(view.id, ""), view.remaining_tokens - OF_THIS_STEP
            if neural and not view.draft_ready:
                return None
            if drafter == "" or view.prefill_tokens:
                newcomers += 1
                drafter = None
            found.append(drafter if left > 0 else None)
            if drafter is not None:
                room = max(room, left)
        if kept.draft_tokens > room:
            return None  # nobody is left who can use all that would be proposed
        if newcomers and (kept.run_neural or not skips_prompts or newcomers > (1 - SMALLER) * len(found)):
            return None
        return self._once_more(kept, tuple(found))

    def nothing(self, names: Set[str], *, skips_prompts: bool) -> DraftPlan | None:
        """`plan` for requests that all decode, where the choice is to propose nothing: their names tell enough."""
        kept = self._plan
        if kept is None or self._since >= _steps_to_keep(kept) or self._in_tow or not _proposes_nothing(kept):
            return None
        if skips_prompts and self._in_general:
            return self._nothing(kept, len(names))
        return self._once_more(kept, (None,) * len(names)) if names <= self._drafters.keys() else None

    def _nothing(self, kept: DraftPlan, requests: int) -> DraftPlan | None:
        """Where nothing pays, it does not for who comes in addition either; a smaller batch is another matter."""
        return self._once_more(kept, (None,) * requests) if requests >= SMALLER * len(kept.drafters) else None

    def _once_more(self, kept: DraftPlan, drafters: tuple[str | None, ...]) -> DraftPlan:
        self._since += 1
        return kept if drafters == kept.drafters else dataclasses.replace(kept, drafters=drafters)

    def lengths(self, batch: Batch, index: Mapping[str, int]) -> tuple[int, ...] | None:
        """How many proposals each request verifies, as the choice saw it; None where that has to be looked at anew:
        proposals for somebody who was not there, or whose worth hangs on other ones, or no room. index: drafter -> its
        number."""
        if not self._paying:
            return self._same_again(batch)
        lengths = []
        for view in batch.requests:
            if not view.proposed:
                lengths.append(0)
                continue
            paying, number = self._paying.get(view.id), index.get(view.drafter or "")
            if paying is None:
                return None
            surely, perhaps = (0, 0) if number is None else paying[number]
            room = max(0, min(view.proposed, view.remaining_tokens - 1))
            if surely < min(room, perhaps):
                return self._same_again(batch)
            lengths.append(min(room, surely))
        return tuple(lengths) if _fit(lengths, batch) else None

    def verified(self, batch: Batch, lengths: tuple[int, ...]) -> None:
        """What looking anew found, for when the same proposals come again: until the next choice none is worth more."""
        if self._plan is not None:
            self._verified = _waiting(batch), lengths

    def _same_again(self, batch: Batch) -> tuple[int, ...] | None:
        waiting, lengths = self._verified
        return lengths if waiting and waiting == _waiting(batch) and _fit(lengths, batch) else None


def _waiting(batch: Batch) -> list[_Waiting]:
    """Empty where prompts are in the step."""
    found = []
    for view in batch.requests:
        if view.prefill_tokens or view.prefill_left:
            return []
        found.append((view.id, view.drafter, min(view.proposed, view.remaining_tokens - 1)))
    return found


def _fit(lengths: Sequence[int], batch: Batch) -> bool:
    return sum(lengths) + len(lengths) <= min(batch.token_budget, batch.free_kv_tokens)


def _steps_to_keep(plan: DraftPlan) -> int:
    if plan.draft_tokens == 0:
        return KEEP_STEPS_PLAIN
    looks_up = plan.neural_tokens == 0 and len(plan.drafters) < MANY_REQUESTS
    return KEEP_STEPS_LOOKUP if looks_up else KEEP_STEPS


def _proposes_nothing(plan: DraftPlan) -> bool:
    return not plan.draft_tokens and not plan.run_neural
