"""From the controller's plan to what the engine's drafters do at the end of a step. Shapes: D drafters, N requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.data.batch import NOBODY, Batch, Bools, Ints
from outrider_runtime.control.data.plans import DraftPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.coverage import ScheduledStep
from outrider_runtime.loop.draft_caches import DraftCaches, KVGap


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    plan: DraftPlan
    """As it is carried out: nobody asks a draft model over a hole, and `feed` is what each drafter really runs over."""
    runs: Bools
    """(D,): who runs. A drafter that reads runs over the whole step; with no tokens to propose only its first pass."""
    holes: tuple[KVGap, ...] = ()
    """What draft models run over before they propose."""


def carry_out(
    plan: DraftPlan, batch: Batch, step: ScheduledStep, drafters: Sequence[Drafter], caches: DraftCaches,
    fed_blocks: Bools,
) -> Order:  # fmt: skip
    """The step is scheduled: the books of caches go on from here.

    fed_blocks: (D,), block drafters that are fed whatever the plan says: a gap costs their proposals for the rest of a
    request."""
    asked, feed, holes = plan.asked.copy(), np.zeros_like(plan.feed), list[KVGap]()
    runs = (plan.passes > 0) | plan.feed.any(axis=1) | fed_blocks
    for number in np.flatnonzero(runs):
        if drafters[number].reads:
            feed[number] = step.tokens
        if drafters[number].is_block:
            asked[(asked == number) & ~caches.is_whole(int(number), step)] = NOBODY
        elif drafters[number].needs_kv:
            closed, whole = _close(int(number), plan, batch, step, caches)
            asked = np.where((asked == number) & ~whole, NOBODY, asked)
            np.add.at(feed[number], [hole.request for hole in closed], [hole.end - hole.start for hole in closed])
            holes += closed
    passes = np.where((asked == np.arange(len(drafters))[:, None, None]).any(axis=(1, 2)), plan.passes, 0)
    runs = (passes > 0) | plan.feed.any(axis=1) | fed_blocks
    caches.ran(step, runs)
    feed[~runs] = 0
    return Order(dataclasses.replace(plan, passes=passes, asked=asked, feed=feed), runs, tuple(holes))


def _close(
    number: int, plan: DraftPlan, batch: Batch, step: ScheduledStep, caches: DraftCaches
) -> tuple[list[KVGap], Bools]:
    """Holes of a draft model that are closed, and who is without one then. Who asks for proposals comes first."""
    before = batch.missing[number] - step.tokens  # (N,): missing from before the step
    if not before.any():
        return [], np.ones(len(before), bool)
    wanted: Ints = np.minimum(plan.feed[number], before)
    asks = (plan.asked == number).any(axis=0)
    order = np.argsort(~asks, kind="stable")
    closed = caches.close(number, step, wanted, order, batch.token_budget)
    return closed, caches.is_whole(number, step)
