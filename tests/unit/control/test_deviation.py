"""What the model gets wrong about one kind of step, and what that does to the choice."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_runtime.control.batch import ExecutionMode
from outrider_runtime.control.costs import DrafterCost, LatencyModel, Shape, StepCost
from outrider_runtime.control.deviation import HALF_LIFE_STEPS, MOST_PROMPT_FACTOR, Deviations, PromptTimes, StepKind
from outrider_runtime.control.latency import OnlineLatency

COST = StepCost(per_batched_token_s=1e-3, constant_s=0.02)


def after(steps: int, seconds: float, predicted_s: float = 0.03) -> Deviations:
    deviations = Deviations()
    for _ in range(steps):
        deviations.observe(StepKind.RAGGED, 12, seconds, predicted_s)
    return deviations


def test_a_steady_deviation_is_learned():
    assert after(100, 0.036).seconds(StepKind.RAGGED, 12) == pytest.approx(0.006, rel=0.1)
    assert after(100, 0.024).seconds(StepKind.RAGGED, 12) == pytest.approx(-0.006, rel=0.1)


def test_a_few_steps_say_little():
    assert abs(after(2, 0.036).seconds(StepKind.RAGGED, 12)) < 0.0015


def test_a_kind_that_was_not_seen_is_taken_to_deviate_as_others_do_until_it_is():
    """Bug: plain steps took 2 ms longer than the model says, as every step did, and verifying looked cheap."""
    deviations = after(100, 0.036)
    assert deviations.seconds(StepKind.PLAIN, 12) == pytest.approx(0.006, rel=0.1)
    for _ in range(60):
        deviations.observe(StepKind.PLAIN, 12, 0.030, 0.03)
    assert abs(deviations.seconds(StepKind.PLAIN, 12)) < 0.001
    assert deviations.seconds(StepKind.RAGGED, 12) > 0.004
    assert deviations.seconds(StepKind.RAGGED, 8) == deviations.seconds(StepKind.RAGGED, 12), "the same power of two"


def test_a_size_that_was_not_seen_is_taken_to_deviate_as_others_do_until_it_is():
    """Under a load that shifts, each size is there for some steps only."""
    deviations = after(100, 0.036)
    assert deviations.seconds(StepKind.RAGGED, 4) == pytest.approx(0.006, rel=0.1)
    for _ in range(60):
        deviations.observe(StepKind.RAGGED, 4, 0.030, 0.03)
    assert deviations.seconds(StepKind.RAGGED, 4) < 0.001
    assert deviations.seconds(StepKind.RAGGED, 12) > 0.004


def test_an_accident_counts_as_a_large_deviation_no_more():
    assert after(1, 3.0).seconds(StepKind.RAGGED, 12) < 0.002


def test_what_is_not_chosen_fades():
    """Or a kind of step that was slow once would never be tried again."""
    deviations = after(100, 0.036)
    before = deviations.seconds(StepKind.RAGGED, 12)
    for _ in range(round(4 * HALF_LIFE_STEPS)):
        deviations.observe(StepKind.PLAIN, 12, 0.03, 0.03)
    assert deviations.seconds(StepKind.RAGGED, 12) < before / 2


def test_the_price_of_each_kind_of_step_comes_to_what_was_measured():
    """Bug: one correction for all cancels in the choice: steps that verify stay as dear as the profile says."""
    model = LatencyModel(dict.fromkeys(ExecutionMode, COST), {"head": DrafterCost(COST)})
    latency = OnlineLatency(model, (), None)
    plain, verifying = Shape(0, 4, 4), Shape(0, 8, 4)
    for _ in range(200):
        latency.observe_decoding(plain, ExecutionMode.UNIFORM, 0.025, verifies=False)
        latency.observe_decoding(verifying, ExecutionMode.UNIFORM, 0.033, verifies=True)
        latency.observe_decoding(verifying, ExecutionMode.RAGGED, 0.031, verifies=True)
    price = latency.price(plain, uniform=True)
    assert price.plain_s() == pytest.approx(0.025, rel=0.02)
    assert price.uniform_s(np.array([4.0]))[0] == pytest.approx(0.033, rel=0.02)
    assert price.ragged_s(np.array([4.0]))[0] == pytest.approx(0.031, rel=0.02)


def test_a_step_that_verifies_never_seems_cheaper_than_a_plain_one():
    """Bug: plain steps of a slow spell, verifying ones of a fast one: at 16 requests speculation looked free."""
    model = LatencyModel(dict.fromkeys(ExecutionMode, COST), {})
    latency = OnlineLatency(model, (), None)
    plain, verifying = Shape(0, 4, 4), Shape(0, 8, 4)
    for _ in range(50):
        latency.observe_decoding(plain, ExecutionMode.UNIFORM, 0.030, verifies=False)
    for mode in (ExecutionMode.UNIFORM, ExecutionMode.RAGGED):
        for _ in range(50):
            latency.observe_decoding(verifying, mode, 0.025, verifies=True)
    for price in (latency.price(plain, uniform=True), latency.price(plain, uniform=False)):
        assert price.ragged_plain_s() >= price.plain_s() > 0.025
        assert price.uniform_s(np.array([0.0]))[0] >= price.plain_s()


def test_a_token_of_a_prompt_costs_the_draft_what_it_costs_above_the_knee():
    """Bug: a head whose tokens are free up to a knee of 4 read prompts of hundreds for nothing."""
    head = DrafterCost(StepCost(per_batched_token_above_knee_s=3e-5, knee_tokens=4.0, constant_s=1e-3))
    assert head.token_s(2) == 0
    assert head.token_s(400) == 3e-5


def test_prompts_that_take_longer_than_the_model_says_are_learned():
    """Deciding who may start hangs on it: 50 tokens of a prompt take 75 ms here, and the model says 50."""
    latency = OnlineLatency(LatencyModel(dict.fromkeys(ExecutionMode, COST)), (), None)
    decoding = Shape(800, 8, 8, 0.8)

    def prompt_s() -> float:
        return float(latency.price(decoding, uniform=True).prompt_s(0, np.array(50.0)))

    assert prompt_s() == pytest.approx(0.050)
    for _ in range(100):
        latency.observe_prompts(decoding, 0, 50, COST.seconds(decoding) + 0.075)
    assert prompt_s() == pytest.approx(0.075, rel=0.06)


def test_one_prompt_that_took_for_ever_moves_little():
    times = PromptTimes()
    times.observe(60.0, 0.05)
    assert times.factor <= 1 + (MOST_PROMPT_FACTOR - 1) / 8
