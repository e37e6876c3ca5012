"""Proposals that wait to be verified, as columns over requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.batch import NO_DRAFTER, Bools, Floats, Ints
from outrider_runtime.control.plans import DraftPlan, Forest, Nodes, Purpose, chains, nothing_proposed

RANKS = 2
NO_STEP = -1
"""Most drafters in the order of a request: the first with a proposal is used."""


@dataclass(slots=True, eq=False)
class PendingProposals:
    """One chain for each request, or its tree if the engine supplies trees. Shapes: N requests."""

    slot: Ints
    """(N,)"""
    step: Ints
    """(N,): number of the step at whose end they are proposed."""
    drafter_order: Ints
    """(RANKS, N): as `DraftPlan.drafter_order`."""
    drafter: Ints
    """(N,): the drafter that proposed them; until the engine reports, the first in the order."""
    length: Ints
    """(N,): tokens proposed; until the engine reports, the longest that a drafter in the order may propose."""
    confidence: Floats
    """(N, K): the drafter's confidence in each token, see `confidences`; NaN: unknown, or not reported yet."""
    reported: Bools
    """(N,): whether the engine has reported the proposals, or none were planned."""
    plan: DraftPlan | None = None
    """The last plan that they come from."""
    nodes: Nodes | None = None
    """The trees of an engine that knows its proposals when it plans. None: chains of `length` by `drafter`."""

    def of(self, slots: Ints) -> PendingProposals:
        """Copy the proposals in `slots` (N,); for the proposals of all slots."""
        return PendingProposals(
            slots, self.step[slots], self.drafter_order[:, slots], self.drafter[slots], self.length[slots],
            self.confidence[slots], self.reported[slots], self.plan,
        )  # fmt: skip

    def clear(self, slots: Ints) -> None:
        """Drop the proposals in `slots`; for the proposals of all slots."""
        self.drafter_order[:, slots] = self.drafter[slots] = NO_DRAFTER
        self.step[slots] = NO_STEP
        self.length[slots] = 0
        self.confidence[slots] = np.nan
        self.reported[slots] = True

    def ask(self, slots: Ints, plan: DraftPlan, step: int) -> None:
        """Expect the proposals of `plan` at the end of `step`, its columns being `slots`; for those of all slots."""
        drafter_order = np.full((RANKS, len(slots)), NO_DRAFTER, np.int64)
        drafter_order[: len(plan.drafter_order)] = plan.drafter_order[:RANKS]
        first = np.where(drafter_order[0] == NO_DRAFTER, drafter_order[1], drafter_order[0])
        self.plan = plan
        self.step[slots] = step
        self.drafter_order[:, slots] = drafter_order
        self.drafter[slots] = first
        self.confidence[slots] = np.nan
        if len(plan.passes):  # room for the proposals of any drafter in the order
            self.length[slots] = np.where(drafter_order == NO_DRAFTER, 0, plan.passes[drafter_order]).max(axis=0)
        else:
            self.length[slots] = 0
        self.reported[slots] = self.length[slots] == 0

    def record(
        self, step: int, slots: Ints, lengths: Ints, drafters: Ints, confidence: Floats | None = None
    ) -> None:  # fmt: skip
        """Record the real proposals of `step`: for the requests in `slots` (N',), their lengths and drafters.

        drafters: `NO_DRAFTER` where no drafter has a proposal. confidence: (N', K'); NaN: unknown.
        """
        row_of_slot = np.full(int(max(self.slot.max(initial=0), slots.max(initial=0))) + 1, -1, np.int64)
        row_of_slot[slots] = np.arange(len(slots))
        row = row_of_slot[self.slot]
        updated = (self.step == step) & (row >= 0)
        row = row[updated]
        self.reported[updated] = True
        self.length[updated] = lengths[row]
        self.drafter[updated] = np.where(drafters[row] == NO_DRAFTER, self.drafter[updated], drafters[row])
        if confidence is not None:
            self.confidence[updated, : confidence.shape[1]] = confidence[row]

    def cut(self, slots: Ints, lengths: Ints) -> None:
        """Shorten the proposals in `slots` to at most `lengths` (N,), as a grammar does; for those of all slots."""
        self.length[slots] = np.minimum(self.length[slots], lengths)

    def forest(self, drafters: int) -> Forest:
        """Return the proposals as trees. drafters: number of drafters in the pool."""
        if self.plan is None:
            return nothing_proposed(len(self.slot), drafters, Purpose.CHOICE)
        if self.nodes is not None:
            return Forest(*self.nodes, self.drafter_order, self.plan.passes, self.plan.purpose)
        lengths = np.where(self.drafter == NO_DRAFTER, 0, self.length)
        real = np.arange(self.confidence.shape[1]) < lengths[:, None]
        made = chains(lengths, self.drafter, self.plan, self.drafter_order, self.confidence[real])
        made.placeholders = ~self.reported
        return made


def no_proposals(slots: int, max_length: int) -> PendingProposals:
    """Make the proposals of all slots before the first plan. max_length: tokens of the longest proposal."""
    no_drafters = np.full((RANKS, slots), NO_DRAFTER, np.int64)
    zeros = np.zeros(slots, np.int64)
    return PendingProposals(
        np.arange(slots), zeros.copy(), no_drafters, no_drafters[0].copy(), zeros,
        confidence=np.full((slots, max_length), np.nan), reported=np.ones(slots, bool),
    )  # fmt: skip
