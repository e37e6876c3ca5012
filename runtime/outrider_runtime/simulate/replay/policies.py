"""Policies without decisions: plain decoding, or one fixed draft length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider_runtime.control.batch import NO_DRAFTER, Batch
from outrider_runtime.control.plans import DraftPlan, Forest, Outcome, Purpose, VerifyPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.replay.workload import Ints


class Fixed:
    """One drafter and draft length for every request; `k` = 0 is plain decoding, in which no drafter runs."""

    def __init__(self, drafters: Sequence[Drafter], drafter: int = 0, k: int = 0) -> None:
        self._drafters, self._drafter, self._k = drafters, drafter, k

    def k(self, batch: Batch) -> int:  # noqa: ARG002
        return self._k

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        lengths = np.bincount(forest.request, minlength=len(batch))
        return VerifyPlan(np.ones(len(forest), bool), lengths, Purpose.FIXED)

    def plan_draft(self, batch: Batch) -> DraftPlan:
        k, number = self.k(batch), self._drafter
        passes = np.zeros(len(self._drafters), np.int64)
        drafter_order = np.full((1, len(batch)), NO_DRAFTER, np.int64)
        feed = np.zeros((len(self._drafters), len(batch)), np.int64)
        if k:
            passes[number] = k
            drafter_order[:] = number
            feed[number] = batch.missing[number]
        return DraftPlan(passes, np.ones_like(passes), drafter_order, feed, Purpose.FIXED)

    def observe(self, outcome: Outcome) -> None: ...

    def release(self, slots: Ints) -> None: ...
