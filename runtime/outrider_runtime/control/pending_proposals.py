"""Proposals that wait to be verified, as columns over requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.batch import NO_DRAFTER, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.plans import DraftPlan, Forest, Nodes, Purpose, chain_nodes, nothing_proposed

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
            slots, self.step[slots], self.drafter_order.take(slots, axis=1), self.drafter[slots], self.length[slots],
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
        self.plan = plan
        self.step[slots] = step
        planned = np.ascontiguousarray(plan.drafter_order)
        _ask(slots, planned, plan.passes, self.drafter_order, self.drafter, self.length, self.confidence, self.reported)

    def record(self, step: int, slots: Ints, lengths: Ints, drafters: Ints, confidence: Floats) -> None:
        """Record the real proposals of `step`: for the requests in `slots` (N',), their lengths and drafters.

        drafters: `NO_DRAFTER` where no drafter has a proposal. confidence: (N', K'); NaN: unknown.
        """
        reported = lengths, drafters, confidence
        _record(step, slots, reported, self.slot, self.step, self.drafter, self.length, self.confidence, self.reported)

    def cut(self, slots: Ints, lengths: Ints) -> None:
        """Shorten the proposals in `slots` to at most `lengths` (N,), as a grammar does; for those of all slots."""
        self.length[slots] = np.minimum(self.length[slots], lengths)

    def forest(self, drafters: int) -> Forest:
        """Return the proposals as trees. drafters: number of drafters in the pool."""
        if self.plan is None:
            return nothing_proposed(len(self.slot), drafters, Purpose.CHOICE)
        if self.nodes is not None:
            return Forest(*self.nodes, self.drafter_order, self.plan.passes, self.plan.purpose)
        (request, parent, drafter, depth, rank), confidence = chain_nodes(self.length, self.drafter, self.confidence)
        return Forest(
            request, parent, drafter, depth, rank, confidence, self.drafter_order, self.plan.passes, self.plan.purpose,
            ~self.reported,
        )  # fmt: skip


@compiled
def _ask(
    slots: Ints, planned: Ints, passes: Ints, drafter_order: Ints, drafter: Ints, length: Ints, confidence: Floats,
    reported: Bools,
) -> None:  # fmt: skip
    """Expect proposals in `slots` (N,). planned: (R, N) and passes: (D,), see `DraftPlan`; the rest: all slots'."""
    for n in range(len(slots)):
        slot, longest = slots[n], 0
        drafter[slot] = NO_DRAFTER
        for rank in range(RANKS):
            d = planned[rank, n] if rank < len(planned) else NO_DRAFTER
            drafter_order[rank, slot] = d
            if d != NO_DRAFTER:  # room for the proposals of any drafter in the order
                longest = max(longest, passes[d])
                drafter[slot] = d if drafter[slot] == NO_DRAFTER else drafter[slot]
        confidence[slot] = np.nan
        length[slot], reported[slot] = longest, longest == 0


@compiled
def _record(
    number: int, slots: Ints, proposed: tuple[Ints, Ints, Floats], slot: Ints, step: Ints, drafter: Ints, length: Ints,
    confidence: Floats, reported: Bools,
) -> None:  # fmt: skip
    """Record real proposals. proposed: lengths, drafters and confidence of `PendingProposals.record`. slot and all
    after it: columns of `PendingProposals`."""
    lengths, drafters, said = proposed
    if not len(slot) or not len(slots):
        return
    row_of_slot = np.full(max(slot.max(), slots.max()) + 1, -1)
    for n in range(len(slots)):
        row_of_slot[slots[n]] = n
    for i in range(len(slot)):
        n = row_of_slot[slot[i]]
        if n < 0 or step[i] != number:
            continue
        reported[i], length[i] = True, min(lengths[n], confidence.shape[1])
        if drafters[n] != NO_DRAFTER:
            drafter[i] = drafters[n]
        for k in range(min(said.shape[1], confidence.shape[1])):
            confidence[i, k] = said[n, k]


def no_proposals(slots: int, max_length: int) -> PendingProposals:
    """Make the proposals of all slots before the first plan. max_length: tokens of the longest proposal."""
    no_drafters = np.full((RANKS, slots), NO_DRAFTER, np.int64)
    zeros = np.zeros(slots, np.int64)
    return PendingProposals(
        np.arange(slots), zeros.copy(), no_drafters, no_drafters[0].copy(), zeros,
        confidence=np.full((slots, max_length), np.nan), reported=np.ones(slots, bool),
    )  # fmt: skip
