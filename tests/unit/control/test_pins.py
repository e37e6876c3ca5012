"""A pin, and mode Static: the drafter that the user chose runs wherever it can."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.control.choose_drafters import plain_choice
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.plans import ExecutionMode, Purpose
from outrider_runtime.control.propose import UNUSED_DECISIONS
from outrider_runtime.control.settings import Drafter, DraftPrefill, HotSettings, Mode, Settings
from outrider_runtime.control.step_times import DrafterCost, LatencyModel, StepCost

from tests.unit.control import columns

HEAD = Drafter("head", passes=True, needs_hidden=True)
DRAFT = Drafter("draft", passes=True, needs_kv=True)
READ = [[1, 1], [1, 1]]
"""`Batch.missing` of two drafters that were fed all tokens of two requests but the last."""


def controller(*drafters: Drafter, mode: Mode = Mode.CLOSED_LOOP) -> Controller:
    settings = Settings(drafters, 3, 8, hot=HotSettings(mode=mode, max_draft_tokens=3))
    return Controller(settings, None, clock=lambda: 0.0, rng=np.random.default_rng(0))


def profiled(*drafters: Drafter) -> Controller:
    """A controller with a profile: a step takes 10 ms, a pass 0.3 ms."""
    passes = DrafterCost(StepCost(per_batched_token_s=1e-7, constant_s=3e-4))
    model = LatencyModel(
        dict.fromkeys(ExecutionMode, StepCost(per_batched_token_s=2e-6, constant_s=1e-2)),
        {drafter.name: passes for drafter in drafters},
    )
    settings = Settings(drafters, 3, 8, hot=HotSettings(max_draft_tokens=3))
    return Controller(settings, model, clock=lambda: 0.0, rng=np.random.default_rng(0))


@pytest.mark.parametrize("drafter", [HEAD, DRAFT], ids=lambda drafter: drafter.name)
@pytest.mark.parametrize("mode", [Mode.CLOSED_LOOP, Mode.STATIC])
def test_pinned_drafter_is_fed_a_chunked_prompt(drafter: Drafter, mode: Mode) -> None:
    """Bug: a draft model was fed only the last chunk of a long prompt. Its gap exceeded a step, and it never ran."""
    loop = controller(drafter, mode=mode)
    if mode is Mode.CLOSED_LOOP:
        loop.pin(3, drafter.name)
    plan = loop.plan_draft(columns.batch(1, prompt=[512], prompt_left=[100], missing=[[512]]))
    assert plan.feed.tolist() == [[512]]
    assert plan.draft_tokens == 0


def test_pin_of_a_block_drafter_at_length_0_feeds_it() -> None:
    """The profiler measures what feeding costs; no other pin of length 0 runs anything."""
    block = Drafter("block", needs_kv=True, needs_hidden=True)
    loop = controller(block, HEAD)
    for drafter, fed in (("block", [True, False]), ("head", [False, False]), (None, [False, False])):
        loop.pin(0, drafter)
        assert loop.fed_blocks.tolist() == fed
        plan = loop.plan_draft(columns.batch(2, missing=READ))
        assert not plan.draft_tokens
        assert not plan.feed.any()


def test_pinned_drafter_is_fed_a_large_gap_in_parts() -> None:
    """Bug: a gap larger than the token budget was never fed, and the request was never drafted for."""
    loop = controller(DRAFT)
    loop.pin(3, "draft")
    plan = loop.plan_draft(columns.batch(2, missing=[[700, 1]], token_budget=512))
    assert plan.feed.tolist() == [[512, 1]]
    assert plan.drafter_order[0].tolist() == [NO_DRAFTER, 0]


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.CLOSED_LOOP])
def test_switched_off_drafter_is_not_fed_despite_always(mode: Mode) -> None:
    """Bug: with `draftPrefill: Always` a suspended drafter was run at every step, and with `mode: Off` each of them."""
    loop = controller(HEAD, DRAFT, mode=mode)
    hot = HotSettings(mode=mode, max_draft_tokens=3, draft_prefill=DraftPrefill.ALWAYS)
    loop.configure(hot)
    loop.suspend("draft", "it raised")
    prompt = columns.batch(1, 2, prompt=[64], missing=[[64], [64]])
    assert loop.plan_draft(prompt).feed.tolist() == [[64 * (mode is not Mode.OFF)], [0]]


def test_suspended_drafter_does_not_run_when_pinned() -> None:
    """Bug: a drafter that raises was run at every step, and raised at every step."""
    loop = controller(DRAFT)
    loop.pin(2, "draft")
    loop.suspend("draft", "it raised")
    plan = loop.plan_draft(columns.batch(2))
    assert (plan.drafter_order == NO_DRAFTER).all()
    assert not plan.feed.any()
    loop.resume("draft")
    assert loop.plan_draft(columns.batch(2)).draft_tokens == 2


def test_gap_larger_than_a_step_is_fed_in_parts() -> None:
    """The draft model can serve no request yet, so nothing speculates; its gaps are fed all the same."""
    loop, missing = profiled(DRAFT), np.full((1, 3), 10_000)
    for step in range(60):
        plan = loop.plan_draft(columns.batch(3, missing=missing, left=[4000] * 3, now_s=0.01 * step))
        if plan.draft_tokens:
            return
        missing = missing - plan.feed
    pytest.fail(f"no request is drafted for; missing: {missing}")


def test_trial_feeds_no_more_than_the_step_holds() -> None:
    """Bug: a trial fed each request's gap whatever the token budget: 1,600 tokens in a step of 512. The requests whose
    gaps fit are tried, the shortest first."""
    missing = np.array([[200, 250, 180, 1, 200, 200, 200, 200]])
    running = columns.batch(8, missing=missing, token_budget=512, left=[500] * 8)
    plan = profiled(DRAFT)._propose._plan_for_one(running, 1, 0, Purpose.EXPLORE)
    assert plan.drafter_order[0].tolist() == [0, NO_DRAFTER, 0, 0] + [NO_DRAFTER] * 4
    assert plan.feed.tolist() == [[200, 0, 180, 1, 132, 0, 0, 0]]


def test_suspended_drafter_stops_during_its_exploration() -> None:
    """It raised in the exploration's first step: the remaining steps must not use it."""
    loop = profiled(HEAD, DRAFT)
    for step in range(200):
        plan = loop.plan_draft(columns.batch(2, 2, now_s=0.01 * step))
        if plan.purpose is Purpose.EXPLORE:
            break
    number = int(plan.drafter_order.max())
    loop.suspend(("head", "draft")[number], "it raised")
    for step in range(10):
        assert not (loop.plan_draft(columns.batch(2, 2, now_s=3 + 0.01 * step)).drafter_order == number).any()


def test_drafter_that_the_choice_runs_starts_no_other_trials() -> None:
    """Bug: while a lookup that runs had found too little to be judged, the head was tried in 97 of 100 steps, as if it
    were the one without a history."""
    loop = profiled(HEAD, Drafter("lookup"))
    loop._evidence.acceptance.has_history[0] = True
    plans = [loop.plan_draft(columns.batch(2, 2, now_s=0.01 * step)) for step in range(100)]
    assert all(plan.passes[1] > 0 for plan in plans)
    assert not any(plan.purpose is Purpose.EXPLORE for plan in plans)


def test_mode_off_reports_no_disabled_drafter() -> None:
    loop, choice = profiled(HEAD), plain_choice(1, 1)
    for _ in range(UNUSED_DECISIONS):
        loop._propose._kv.note_use(choice)
    assert loop.state().has_disabled_drafts
    loop.configure(HotSettings(mode=Mode.OFF))
    assert not loop.state().has_disabled_drafts


def test_static_uses_the_first_drafter_of_the_hot_order() -> None:
    """A reordered pool needs no restart. Drafters that the order leaves out come last."""
    loop = controller(HEAD, DRAFT, mode=Mode.STATIC)
    for order, number in (((), 0), (("draft",), 1), (("draft", "head"), 1), (("head", "draft"), 0)):
        loop.configure(HotSettings(mode=Mode.STATIC, max_draft_tokens=3, order=order))
        plan = loop.plan_draft(columns.batch(2, missing=READ))
        assert plan.drafter_order[0].tolist() == [number, number]
    loop.configure(HotSettings(mode=Mode.STATIC, max_draft_tokens=3, order=("draft", "head")))
    loop.suspend("draft", "it raised")
    assert loop.plan_draft(columns.batch(2, missing=READ)).drafter_order[0].tolist() == [0, 0]
