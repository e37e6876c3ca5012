"""What keeps the loop honest: probes that compare like with like, and exploration that costs a percent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from outrider_runtime.control.batch import DraftPlan, ExecutionMode, Purpose, RequestOutcome, StepOutcome, VerifyPlan
from outrider_runtime.control.choice import TargetPrice
from outrider_runtime.control.costs import StepCost
from outrider_runtime.control.drafting import DraftProblem
from outrider_runtime.control.explore import FIRST_CREDIT_S, LOSS_SHARE, Explorer, upper_bounds
from outrider_runtime.control.truth import FIRST_BACKOFF_STEPS, PROBE_STEPS, Truth

STEP_S = 0.02


def outcome(
    purpose: Purpose, *, verified_for: Purpose | None = None, tokens: int = 4, step_s: float = STEP_S,
    draft_s: float = 0.0, requests: int = 4, prefill: int = 0,
) -> StepOutcome:  # fmt: skip
    """A step that ran under `purpose`, its proposals made under `verified_for`."""
    plan = DraftPlan(2, ("eagle",) * requests, True, True, 2, purpose)
    return StepOutcome(
        now=0.0, step_s=step_s, target_s=step_s - draft_s, n_context=100, n_batched=3 * requests, n_requests=requests,
        n_decoding=requests,
        mode=ExecutionMode.UNIFORM, tokens=tokens, draft_plan=plan,
        verify_plan=VerifyPlan((2,) * requests, purpose if verified_for is None else verified_for),
        requests=tuple(RequestOutcome(str(i), None, "eagle", 2, 2, 2, 1) for i in range(requests)),
        draft_s={"eagle": draft_s} if draft_s else {}, prefill_tokens=prefill,
    )  # fmt: skip


def probe(truth: Truth, *, plain: int = 4, plain_s: float = STEP_S, draft_s: float = 0.0, **speculative: float) -> None:
    """Speculative steps until a probe is due, its block, and two steps after it: the first verifies nothing either."""
    while not truth.next_is_probe(4, speculating=True, prefill=False):
        truth.observe(outcome(Purpose.CHOICE, **speculative))  # type: ignore[arg-type]
    truth.observe(outcome(Purpose.PROBE, verified_for=Purpose.CHOICE, **speculative))  # type: ignore[arg-type]
    while truth.next_is_probe(4, speculating=True, prefill=False):
        truth.observe(outcome(Purpose.PROBE, tokens=plain, step_s=plain_s + draft_s, draft_s=draft_s))
    truth.observe(outcome(Purpose.CHOICE, verified_for=Purpose.PROBE, tokens=plain, step_s=plain_s))
    truth.observe(outcome(Purpose.CHOICE, **speculative))  # type: ignore[arg-type]


def test_a_probes_first_step_is_no_plain_decoding():
    """It still verifies what was proposed before; the four steps that verify nothing count."""
    truth = Truth(np.random.default_rng(0))
    probe(truth, tokens=8, plain=4)
    assert truth.counters.probes == 1
    assert truth.counters.baseline_tokens == PROBE_STEPS * 4
    assert truth.counters.baseline_s == pytest.approx(PROBE_STEPS * STEP_S)


def test_the_drafts_pass_in_a_probe_is_subtracted():
    """It runs to keep its KV whole; plain decoding would not run it."""
    truth = Truth(np.random.default_rng(0))
    probe(truth, tokens=8, draft_s=0.015)
    assert truth.counters.baseline_s == pytest.approx(PROBE_STEPS * STEP_S)


def test_steps_of_another_batch_or_with_prefill_are_no_neighbours():
    """Speculation at one request says nothing about plain decoding at four."""
    truth = Truth(np.random.default_rng(0))
    for _ in range(200):
        truth.observe(outcome(Purpose.CHOICE, tokens=90, requests=1))
        truth.observe(outcome(Purpose.CHOICE, tokens=90, prefill=64))
    probe(truth, tokens=8)
    assert truth.counters.speculative_tokens == pytest.approx(PROBE_STEPS * 8)


def test_steps_that_slo_classes_shaped_are_no_measure_of_speculation():
    """They may cost goodput on purpose: the guard must not switch speculation off for that."""
    truth = Truth(np.random.default_rng(0))
    for _ in range(200):
        truth.observe(outcome(Purpose.SLO, tokens=1))
    probe(truth, tokens=8)
    assert truth.counters.speculative_tokens == pytest.approx(PROBE_STEPS * 8)
    assert not truth.off


def off_steps(truth: Truth) -> int:
    """How long speculation stays off."""
    steps = 0
    while truth.off:
        truth.next_is_probe(4, speculating=False, prefill=False)
        steps += 1
    return steps


def lose(truth: Truth) -> None:
    """Probes that find plain decoding twice as fast, until speculation is off."""
    while not truth.off:
        probe(truth, tokens=4, plain=8)


def test_speculation_that_measures_worse_is_switched_off_for_longer_each_time():
    """Exponential back-off; a difference within the noise switches nothing."""
    truth = Truth(np.random.default_rng(0))
    probe(truth, tokens=4, plain=4)
    assert not truth.off
    periods = []
    for _ in range(3):
        lose(truth)
        periods.append(off_steps(truth))
    assert periods == [FIRST_BACKOFF_STEPS, 2 * FIRST_BACKOFF_STEPS, 4 * FIRST_BACKOFF_STEPS]


def test_a_change_of_traffic_or_a_lighter_load_lifts_the_ban():
    """What was measured says nothing about it."""
    for lift in (Truth.lift, lambda truth: truth.next_is_probe(2, speculating=True, prefill=False)):
        truth = Truth(np.random.default_rng(0))
        lose(truth)
        lift(truth)
        assert not truth.off


def test_exploration_costs_a_percent_of_the_time_that_serving_takes():
    """Whatever a block loses over serving as before is paid before the next may start."""
    explorer = Explorer(np.random.default_rng(0))
    plain_rate, busy_s, lost_s = 4 / STEP_S, 0.0, 0.0
    for _ in range(20_000):
        if explorer.due(eager=True):
            explorer.start(0, requests=4, max_draft_tokens=3)
        exploring = explorer.step() is not None
        step = outcome(Purpose.EXPLORE if exploring else Purpose.CHOICE, step_s=STEP_S + 0.01 * exploring)
        explorer.observe(step, plain_rate)
        busy_s += step.step_s
        lost_s += step.step_s - STEP_S
    assert 0 < lost_s <= LOSS_SHARE * busy_s + FIRST_CREDIT_S + 0.08


def test_the_drafter_with_the_highest_upper_bound_is_explored():
    """What it may gain, not what it is thought to: a cheap lookup before a head that costs more than it can bring."""
    cost = StepCost(per_batched_token_s=1e-3, constant_s=0.01)
    problem = DraftProblem(
        gains=np.full((3, 2, 2), 0.1), offers=np.ones((3, 2, 2)),
        usable=np.array([[True, True], [True, True], [False, False]]), neural=1,
        draft_s=np.array([[0.0, 1e-4, 1e-4], [0.0, 0.05, 0.1], [0.0, 0.0, 0.0]]), query_costs_s=np.zeros(2),
        neural_token_s=0.0, price=TargetPrice(2.0, cost, cost, None, float("inf"), 0.01, 0.01, 0.0), rate=100.0,
        budget=100,
    )  # fmt: skip
    upper = np.array([[0.5, 0.2], [0.9, 0.8], [0.99, 0.98]])
    bounds = upper_bounds(problem, upper)
    assert int(bounds.argmax()) == 0
    assert bounds[2] == -np.inf
    steep = dataclasses.replace(cost, per_batched_token_above_knee_s=20e-3, knee_tokens=2.0)
    large = dataclasses.replace(problem, price=dataclasses.replace(problem.price, ragged=steep, uniform=steep))
    assert (upper_bounds(large, upper) < 0).all(), "behind a knee no acceptance pays for a token"
