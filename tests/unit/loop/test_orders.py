"""Orders to the drafters, made from the controller's plan."""

from __future__ import annotations

from typing import Any

import numpy as np
from outrider_runtime.control.batch import NO_DRAFTER, Batch
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.drafters import traits
from outrider_runtime.loop.coverage import ScheduledStep
from outrider_runtime.loop.draft_caches import UNFILLABLE_GAP_TOKENS, DraftCaches
from outrider_runtime.loop.orders import Order, carry_out

from tests.engine.engines import TARGET, block, draft_model, eagle, lookup
from tests.unit.control import columns

POOL = tuple(traits(drafter) for drafter in (lookup(), eagle(), draft_model(TARGET)))
CHAINS = np.ones(3, np.int64)
LOOKUP, HEAD, DRAFT = range(3)
NO_BLOCKS = np.zeros(3, bool)


def carried_out(
    passes: list[int], drafter_order: Any, *, feed: Any = None, gaps: tuple[int, ...] = (0, 0), budget: int = 8192,
    unsure: tuple[int, ...] = (0, 0),
) -> tuple[Order, Batch]:  # fmt: skip
    """Two requests of 100 tokens that decode; the draft model has not seen the last `gaps` of them."""
    caches = DraftCaches(POOL, 2, 16, lambda _drafter, _name, first, last: list(range(first, last + 1)))
    names, slots, ones = ["a", "b"], np.arange(2), np.ones(2, np.int64)
    context, gap = np.full(2, 100), np.array(gaps)
    seen = context - gap
    read = ScheduledStep(names, slots, np.zeros(2, np.int64), np.zeros(2, np.int64), seen, seen)
    caches.ran(read, np.array([False, True, True]))
    caches.ran(ScheduledStep(names, slots, seen, seen, 0 * ones, gap), np.array([False, True, not gap.any()]))
    step = ScheduledStep(names, slots, context, context - np.array(unsure), 0 * ones, ones)
    batch = columns.batch(2, 3, missing=caches.missing(step), token_budget=budget)
    planned_feed = batch.missing if feed is None else np.array(feed)
    feed_of = planned_feed * (np.array(passes) > 0)[:, None]
    plan = DraftPlan(np.array(passes), CHAINS, np.array(drafter_order), feed_of, Purpose.CHOICE)
    return carry_out(plan, batch, step, POOL, caches, NO_BLOCKS), batch


def test_head_may_run_without_proposing_but_not_a_lookup() -> None:
    """Its first pass keeps its cache whole."""
    feed = np.array([[0, 0], [1, 1], [0, 0]])
    plan = DraftPlan(np.zeros(3, np.int64), CHAINS, np.full((1, 2), NO_DRAFTER), feed, Purpose.CHOICE)
    caches, ones = DraftCaches(POOL, 2, 16, lambda *_: []), np.ones(2, np.int64)
    step = ScheduledStep(["a", "b"], np.arange(2), 0 * ones, 0 * ones, ones, ones)
    order = carry_out(plan, columns.batch(2, 3), step, POOL, caches, NO_BLOCKS)
    assert order.runs.tolist() == [False, True, False]
    assert not order.plan.draft_tokens
    nothing = DraftPlan(plan.passes, CHAINS, plan.drafter_order, 0 * plan.feed, Purpose.CHOICE)
    assert not carry_out(nothing, columns.batch(2, 3), step, POOL, caches, NO_BLOCKS).runs.any()


def test_gap_is_filled_before_the_draft_model_proposes() -> None:
    """The cost that is learned is that of all tokens that it ran over."""
    order, _ = carried_out([0, 0, 3], [[DRAFT, DRAFT]], gaps=(40, 40))
    assert [(gap.request, gap.start, gap.end) for gap in order.gaps] == [(0, 60, 100), (1, 60, 100)][: len(order.gaps)]
    assert order.plan.drafter_order.tolist() == [[DRAFT, DRAFT]]
    assert order.plan.feed[DRAFT].sum() == 2 + sum(gap.end - gap.start for gap in order.gaps)


def test_no_proposals_are_made_over_a_gap() -> None:
    """A part of the gap was closed: the rest is for later steps."""
    order, _ = carried_out([2, 0, 3], [[DRAFT, LOOKUP]], feed=[[0, 0], [0, 0], [10, 10]], gaps=(40, 40))
    assert order.plan.drafter_order.tolist() == [[NO_DRAFTER, LOOKUP]]
    assert order.plan.passes.tolist() == [2, 0, 0]


def test_gap_is_filled_up_to_tokens_under_verification() -> None:
    """Bug: under asynchronous scheduling some tokens before a step are always unknown to the host while a lookup
    proposes. No gap was filled then, so a draft model that had paused once was lost to every running request."""
    order, _ = carried_out([0, 0, 3], [[DRAFT, DRAFT]], gaps=(40, 40), unsure=(3, 3))
    assert [(gap.request, gap.start, gap.end) for gap in order.gaps] == [(0, 60, 100), (1, 60, 100)]
    assert order.plan.drafter_order.tolist() == [[DRAFT, DRAFT]]


def test_no_more_is_caught_up_on_than_a_step_holds() -> None:
    """Bug: the draft's buffers hold a step's tokens."""
    order, batch = carried_out([0, 0, 3], [[DRAFT, DRAFT]], gaps=(40, 40), budget=30)
    assert sum(gap.end - gap.start for gap in order.gaps) <= batch.token_budget
    assert order.plan.drafter_order.tolist() == [[NO_DRAFTER, NO_DRAFTER]]


def block_steps(first_runs: bool) -> tuple[Order, Any]:
    """Two requests of 100 tokens that ask a block drafter. Prompts were read with it, or else without."""
    pool = (traits(lookup()), traits(block(TARGET)))
    caches = DraftCaches(pool, 2, 16, lambda _drafter, _name, first, last: list(range(first, last + 1)))
    names, slots, ones = ["a", "b"], np.arange(2), np.ones(2, np.int64)
    caches.ran(ScheduledStep(names, slots, 0 * ones, 0 * ones, 100 * ones, 100 * ones), np.array([False, first_runs]))
    step = ScheduledStep(names, slots, 100 * ones, 100 * ones, 0 * ones, ones)
    batch = columns.batch(2, 2, missing=caches.missing(step))
    plan = DraftPlan(
        np.array([0, 3]), np.ones(2, np.int64), np.ones((1, 2), np.int64), 0 * batch.missing, Purpose.CHOICE
    )
    return carry_out(plan, batch, step, pool, caches, np.array([False, True])), batch.missing[1].tolist()


def test_block_drafter_proposes_where_its_context_is_whole() -> None:
    order, missing = block_steps(first_runs=True)
    assert missing == [1, 1]
    assert (order.plan.drafter_order == 1).all()
    assert order.plan.passes.tolist() == [0, 3]
    assert order.plan.feed.tolist() == [[0, 0], [1, 1]]


def test_block_drafter_with_a_gap_is_fed_and_never_proposes() -> None:
    """Hidden states are gone after their step, so no step closes the gap, and proposals over it are junk."""
    order, missing = block_steps(first_runs=False)
    assert min(missing) == UNFILLABLE_GAP_TOKENS
    assert (order.plan.drafter_order == NO_DRAFTER).all()
    assert not order.plan.passes.any()
    assert order.runs.tolist() == [False, True]
    assert not order.gaps
