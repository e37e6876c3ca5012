"""Turns the controller's plan into the drafters' work at the end of a step. Shapes: D drafters, N requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.batch import Batch, Bools, Ints
from outrider_runtime.control.plans import DraftPlan, drop_gaps
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
    gaps, whole = list[KVGap](), np.ones(plan.feed.shape, bool)
    for number in caches.with_kv:
        if plan.passes[number] > 0 or fed_blocks[number] or plan.feed[number].any():
            if not drafters[number].is_block:
                gaps += _fill(number, plan, batch, step, caches)
            whole[number] = caches.is_whole(number, step)
    planned = plan.passes, np.ascontiguousarray(plan.drafter_order), plan.feed
    passes, drafter_order, feed, runs = drop_gaps(planned, fed_blocks, whole, caches.reads, step.tokens)
    caches.ran(step, runs)
    for gap in gaps:
        feed[gap.drafter, gap.request] += (gap.end - gap.start) * runs[gap.drafter]
    return Order(DraftPlan(passes, plan.widths, drafter_order, feed, plan.purpose, plan.arms), runs, tuple(gaps))


def _fill(number: int, plan: DraftPlan, batch: Batch, step: ScheduledStep, caches: DraftCaches) -> list[KVGap]:
    """Return the KV gaps of a draft model that are filled; requests that it proposes for come first."""
    gap_tokens = batch.missing[number] - step.tokens  # (N,): missing from before the step
    if not gap_tokens.any():
        return []
    catch_up_tokens: Ints = np.minimum(plan.feed[number], gap_tokens)
    proposes = (plan.drafter_order == number).any(axis=0)
    row_order = np.argsort(~proposes, kind="stable")
    return caches.fill(number, step, catch_up_tokens, row_order, batch.token_budget)
