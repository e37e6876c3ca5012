"""Proposals that wait to be verified, in columns over requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.data.batch import NOBODY, Bools, Floats, Ints
from outrider_runtime.control.data.forest import Forest, Nodes, chains, nothing_proposed
from outrider_runtime.control.data.plans import DraftPlan, Purpose

RANKS = 2
"""Drafters that a request asks at most, one after the other."""


@dataclass(slots=True, eq=False)
class PendingProposals:
    """One chain a request, or its tree where the engine hands it over. Shapes: N requests."""

    slot: Ints
    """(N,)"""
    step: Ints
    """(N,): at the end of which they were asked for."""
    asked: Ints
    """(RANKS, N): as `DraftPlan.asked`."""
    drafter: Ints
    """(N,): whose they are; of whoever is asked first until the engine tells."""
    length: Ints
    """(N,): the longest that any of its drafters may propose until the engine tells."""
    confidence: Floats
    """(N, K): the drafter's own of each token, see `confidences`; NaN: not known, or not reported yet."""
    reported: Bools
    """(N,): whether the engine has reported what was proposed, or nothing was to be."""
    plan: DraftPlan | None = None
    """The last one that they come from."""
    nodes: Nodes | None = None
    """Of an engine that knows its proposals when it plans. None: chains of `length` by `drafter`."""

    def of(self, slots: Ints) -> PendingProposals:
        """A copy of those in `slots` (N,), from the proposals of all slots."""
        return PendingProposals(
            slots, self.step[slots], self.asked[:, slots], self.drafter[slots], self.length[slots],
            self.confidence[slots], self.reported[slots], self.plan,
        )  # fmt: skip

    def clear(self, slots: Ints) -> None:
        """Nothing is proposed for the requests in `slots` any more. Of the proposals of all slots."""
        self.asked[:, slots] = self.drafter[slots] = self.step[slots] = NOBODY
        self.length[slots] = 0
        self.confidence[slots] = np.nan
        self.reported[slots] = True

    def ask(self, slots: Ints, plan: DraftPlan, step: int) -> None:
        """`plan` is carried out at the end of `step`. Of the proposals of all slots; the plan's columns are theirs."""
        asked = np.full((RANKS, len(slots)), NOBODY, np.int64)
        asked[: len(plan.asked)] = plan.asked[:RANKS]
        first = np.where(asked[0] == NOBODY, asked[1], asked[0])
        self.plan = plan
        self.step[slots] = step
        self.asked[:, slots] = asked
        self.drafter[slots] = first
        self.confidence[slots] = np.nan
        if len(plan.passes):  # whichever drafter has proposals, they fit
            self.length[slots] = np.where(asked == NOBODY, 0, plan.passes[asked]).max(axis=0)
        else:
            self.length[slots] = 0
        self.reported[slots] = self.length[slots] == 0

    def came_back(
        self, step: int, slots: Ints, lengths: Ints, drafters: Ints, confidence: Floats | None = None
    ) -> None:  # fmt: skip
        """What was really proposed at the end of `step` for the requests in `slots` (N',), and by which drafters;
        NOBODY: none has a proposal. confidence: (N', K'), in it; NaN: not known."""
        told = np.full(int(max(self.slot.max(initial=0), slots.max(initial=0))) + 1, -1, np.int64)
        told[slots] = np.arange(len(slots))
        row = told[self.slot]
        here = (self.step == step) & (row >= 0)
        row = row[here]
        self.reported[here] = True
        self.length[here] = lengths[row]
        self.drafter[here] = np.where(drafters[row] == NOBODY, self.drafter[here], drafters[row])
        if confidence is not None:
            self.confidence[here, : confidence.shape[1]] = confidence[row]

    def cut(self, slots: Ints, lengths: Ints) -> None:
        """No more than `lengths` (N,) are left of those in `slots`: a grammar ruled some out. Of all slots."""
        self.length[slots] = np.minimum(self.length[slots], lengths)

    def forest(self, drafters: int) -> Forest:
        """drafters: of the pool."""
        if self.plan is None:
            return nothing_proposed(len(self.slot), drafters, Purpose.CHOICE)
        if self.nodes is not None:
            return Forest(*self.nodes, self.asked, self.plan.passes, self.plan.purpose)
        lengths = np.where(self.drafter == NOBODY, 0, self.length)
        real = np.arange(self.confidence.shape[1]) < lengths[:, None]
        made = chains(lengths, self.drafter, self.plan, self.asked, self.confidence[real])
        made.placeholders = ~self.reported
        return made


def no_proposals(slots: int, most: int) -> PendingProposals:
    """The proposals of all slots before the first plan. most: tokens of a proposal."""
    nobody, nothing = np.full((RANKS, slots), NOBODY, np.int64), np.zeros(slots, np.int64)
    return PendingProposals(
        np.arange(slots), nothing.copy(), nobody, nobody[0].copy(), nothing, confidence=np.full((slots, most), np.nan),
        reported=np.ones(slots, bool),
    )  # fmt: skip
