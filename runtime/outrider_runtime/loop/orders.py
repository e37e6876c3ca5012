"""Turns the controller's plan into the drafters' work at the end of a step. Shapes: D drafters, N requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.batch import NO_DRAFTER, Batch, Bools, Ints
from outrider_runtime.control.plans import DraftPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.coverage import ScheduledStep
from outrider_runtime.loop.draft_caches import DraftCaches, KVGap


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    plan: DraftPlan
    """The plan as it is carried out: without proposals over a KV gap, and with the tokens that each drafter really
    processes in `feed`."""
    runs: Bools
    """(D,): drafters that run. A drafter with a cache runs over the whole step; with draft length 0 only its first
    pass runs."""
    gaps: tuple[KVGap, ...] = ()
    """KV gaps that draft models fill before they propose."""


def carry_out(
    plan: DraftPlan, batch: Batch, step: ScheduledStep, drafters: Sequence[Drafter], caches: DraftCaches,
    fed_blocks: Bools,
) -> Order:  # fmt: skip
    """Make the order for a scheduled step, and update the drafters' caches.

    fed_blocks: (D,), block drafters that are fed in any case, since a gap ends their proposals for a request.
    """
    drafter_order, feed, gaps = plan.drafter_order.copy(), np.zeros_like(plan.feed), list[KVGap]()
    runs = (plan.passes > 0) | plan.feed.any(axis=1) | fed_blocks
    for number in np.flatnonzero(runs):
        if drafters[number].reads:
            feed[number] = step.tokens
        if drafters[number].is_block:
            drafter_order[(drafter_order == number) & ~caches.is_whole(int(number), step)] = NO_DRAFTER
        elif drafters[number].needs_kv:
            filled, whole = _fill(int(number), plan, batch, step, caches)
            drafter_order = np.where((drafter_order == number) & ~whole, NO_DRAFTER, drafter_order)
            np.add.at(feed[number], [gap.request for gap in filled], [gap.end - gap.start for gap in filled])
            gaps += filled
    proposes = (drafter_order == np.arange(len(drafters))[:, None, None]).any(axis=(1, 2))
    passes = np.where(proposes, plan.passes, 0)
    runs = (passes > 0) | plan.feed.any(axis=1) | fed_blocks
    caches.ran(step, runs)
    feed[~runs] = 0
    return Order(dataclasses.replace(plan, passes=passes, drafter_order=drafter_order, feed=feed), runs, tuple(gaps))


def _fill(
    number: int, plan: DraftPlan, batch: Batch, step: ScheduledStep, caches: DraftCaches
) -> tuple[list[KVGap], Bools]:
    """Return the KV gaps of a draft model that are filled, and the requests without a gap then.

    Requests that the draft model proposes for come first.
    """
    gap_tokens = batch.missing[number] - step.tokens  # (N,): missing from before the step
    if not gap_tokens.any():
        return [], np.ones(len(gap_tokens), bool)
    catch_up_tokens: Ints = np.minimum(plan.feed[number], gap_tokens)
    proposes = (plan.drafter_order == number).any(axis=0)
    row_order = np.argsort(~proposes, kind="stable")
    filled = caches.fill(number, step, catch_up_tokens, row_order, batch.token_budget)
    return filled, caches.is_whole(number, step)
