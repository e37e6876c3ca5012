"""Step times: fitted, corrected while serving, and deaf to nonsense."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import ExecutionMode
from outrider_runtime.control.costs import DrafterCost, LatencyModel, Shape, StepCost
from outrider_runtime.control.fit import Form, Sample, fit
from outrider_runtime.control.latency import OnlineLatency
from outrider_runtime.control.least_squares import Multipliers, non_negative
from outrider_runtime.control.settings import DrafterSpec

TARGET = StepCost(per_context_token_s=1e-6, per_batched_token_s=1e-3, constant_s=0.01)
DRAFT = DrafterCost(StepCost(per_batched_token_s=1e-4, constant_s=1e-3))
POOL = (DrafterSpec("lookup", neural=False), DrafterSpec("eagle", neural=True))
RAGGED, UNIFORM = ExecutionMode.RAGGED, ExecutionMode.UNIFORM
ONE = Shape(100, 1, 1)


def online(*, profile: bool = True, graphs: int | None = None) -> OnlineLatency:
    model = LatencyModel({RAGGED: TARGET, UNIFORM: TARGET}, {"eagle": DRAFT}) if profile else None
    return OnlineLatency(model, POOL, graphs)


def grid(cost: StepCost, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for requests in (1, 2, 4, 8, 16, 24):
        for query in (1, 2, 4, 6):
            for context in (50, 400):
                shape = Shape(context * requests, requests * query, requests, requests * query * context / 1000)
                samples.append(Sample(shape, cost.seconds(shape) * math.exp(rng.normal(0, noise))))
    return samples


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_non_negative_least_squares_is_optimal(size, seed):
    """Its conditions of optimality hold: no negative coefficient, no direction that would still help."""
    rng = np.random.default_rng(seed)
    design, y = rng.normal(size=(8, size)), rng.normal(size=8)
    solution = non_negative(design.T @ design, design.T @ y)
    gradient = design.T @ (design @ solution - y)
    assert (solution >= 0).all()
    assert (gradient > -1e-6).all()
    assert np.abs(gradient[solution > 1e-9]) == pytest.approx(0, abs=1e-6)


def test_the_fit_finds_the_knee_and_both_slopes():
    """Hardware bends where it turns from memory-bound to compute-bound (AdaServe's token budget)."""
    cost = StepCost(1e-7, 1e-4, 9e-4, 32, 0.0, 0.0, 0.012)
    found = fit(grid(cost, 0.01), grid(cost, 0.01, seed=1))
    assert found.error < 0.02
    assert found.cost.knee_tokens == pytest.approx(32, abs=8)
    assert 0 < found.cost.per_batched_token_s < found.cost.per_batched_token_above_knee_s


def test_the_smallest_form_that_holds_is_kept():
    """Terms that nothing asks for are left out; those that the held-out error asks for are not."""
    base = fit(grid(TARGET, 0.01), grid(TARGET, 0.01, seed=1))
    assert base.form is Form.BASE
    per_request = StepCost(1e-7, 1e-4, 0.0, 0.0, 3e-3, 0.0, 0.005)
    found = fit(grid(per_request, 0.01), grid(per_request, 0.01, seed=1))
    assert found.form is Form.PER_REQUEST
    assert found.error < 0.03
    crossed = StepCost(0.0, 1e-4, 0.0, 0.0, 0.0, 2e-3, 0.005)
    assert fit(grid(crossed), grid(crossed)).form is Form.PER_CONTEXT_QUERY


def test_the_fit_tells_a_prompts_tokens_from_those_with_logits():
    """On two cores a token that is verified costs twice what a prompt's does: the head and the sampler run for it."""
    cost = StepCost(per_batched_token_s=4e-4, per_logits_token_s=5e-4, constant_s=0.02)
    shapes = [Shape(0, requests * tokens + prompt, requests, 0, prompt)
              for requests in (1, 4, 16) for tokens in (1, 4) for prompt in (0, 64, 256)]  # fmt: skip
    found = fit([Sample(shape, cost.seconds(shape)) for shape in shapes]).cost
    assert found.per_batched_token_s == pytest.approx(4e-4, rel=0.01)
    assert found.per_logits_token_s == pytest.approx(5e-4, rel=0.01)
    without = fit([Sample(shape, cost.seconds(shape)) for shape in shapes if not shape.n_prompt]).cost
    assert without.per_batched_token_s == pytest.approx(9e-4, rel=0.01), "where all have logits, there is one price"
    assert without.per_logits_token_s == 0


def test_a_prompts_token_is_cheaper_than_one_that_is_verified():
    cost = StepCost(per_batched_token_s=4e-4, per_logits_token_s=5e-4, constant_s=0.02)
    latency = OnlineLatency(LatencyModel({RAGGED: cost}), (), None)
    decoding, mixed = Shape(0, 4, 4), Shape(0, 4 + 64, 5, 0, 64)
    price = latency.price(decoding, uniform=True)
    assert price.plain_s() == pytest.approx(cost.seconds(decoding))
    assert price.ragged_s(np.array(3.0)) == pytest.approx(cost.seconds(decoding) + 3 * 9e-4)
    assert price.prompt_s(3, np.array(64.0)) == pytest.approx(64 * 4e-4)
    beside = latency.price(mixed, uniform=False)
    assert beside.plain_s() == pytest.approx(cost.seconds(mixed))
    assert beside.ragged_s(np.array(3.0)) == pytest.approx(cost.seconds(mixed) + 3 * 9e-4)


def test_a_time_that_is_none_is_refused_by_the_fit():
    """A report built on a NaN would be believed."""
    with pytest.raises(ValueError, match="drop that measurement"):
        fit([Sample(ONE, float("nan"))])
    with pytest.raises(ValueError, match="no samples"):
        fit([])


def test_the_fitted_cost_states_its_error():
    """The held-out error is that of shapes the fit has not seen."""
    fitted = fit([Sample(ONE, 0.02)], held_out=[Sample(ONE, 0.01)])
    assert fitted.error == pytest.approx(1.0)


def test_a_machine_that_slows_down_is_noticed_within_thirty_steps():
    """Online correction of the target's intercept and slope."""
    latency = online()
    for step in range(30):
        shape = Shape(100, 1 + step % 5, 1)
        assert latency.observe_target(shape, RAGGED, 2 * TARGET.seconds(shape))
    assert latency.target_s(ONE, RAGGED) == pytest.approx(2 * TARGET.seconds(ONE), rel=0.1)
    five = Shape(100, 5, 1)
    assert latency.target_s(five, RAGGED) == pytest.approx(2 * TARGET.seconds(five), rel=0.1)


def test_intercept_and_slope_are_told_apart():
    """One common factor would cancel in the argmax and change nothing."""
    latency = online()
    truth = StepCost(constant_s=0.01, per_batched_token_s=3e-3)
    for step in range(60):
        shape = Shape(0, 1 + step % 8, 1)
        latency.observe_target(shape, RAGGED, truth.seconds(shape))
    rise = latency.target_s(Shape(0, 8, 1), RAGGED) - latency.target_s(Shape(0, 1, 1), RAGGED)
    assert rise > 7 * 1.6e-3  # of 3e-3, from 1e-3: a third of the way, as a profile is not wrong by that much


def test_a_draft_that_slows_three_times_costs_three_times_in_a_dozen_steps():
    """Draft and target are corrected apart; the target's estimate stays."""
    latency = online()
    before = latency.target_s(ONE, RAGGED)
    for _ in range(12):
        latency.observe_draft("eagle", ONE, 3, 3 * DRAFT.seconds(ONE, 3))
    assert latency.draft_s("eagle", ONE, 3) == pytest.approx(3 * DRAFT.seconds(ONE, 3), rel=0.12)
    assert latency.target_s(ONE, RAGGED) == before


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -0.01, 0.0, 30.0])
def test_a_time_that_cannot_be_a_steps_is_dropped(seconds):
    """NaN, negative, or a machine that slept: the estimate does not move."""
    latency = online()
    before = latency.target_s(ONE, RAGGED), latency.draft_s("eagle", ONE, 2)
    assert not latency.observe_target(ONE, RAGGED, seconds)
    assert not latency.observe_draft("eagle", ONE, 2, seconds)
    assert (latency.target_s(ONE, RAGGED), latency.draft_s("eagle", ONE, 2)) == before


def test_a_machine_that_really_is_that_slow_is_believed_in_the_end():
    """A profile from a far faster machine must not make the pod deaf."""
    latency = online()
    taken = [latency.observe_target(ONE, RAGGED, 1.5) for _ in range(40)]
    assert not taken[0]
    assert taken[-1]
    assert latency.target_s(ONE, RAGGED) > 0.5


def test_one_slow_step_moves_little():
    """A garbage collection or a noisy neighbour is no new cost."""
    latency = online()
    for _ in range(40):
        latency.observe_target(ONE, RAGGED, TARGET.seconds(ONE))
    latency.observe_target(ONE, RAGGED, 15 * TARGET.seconds(ONE))
    assert latency.target_s(ONE, RAGGED) < 1.15 * TARGET.seconds(ONE)


def test_without_a_profile_costs_are_learned_from_the_pods_own_steps():
    """Prefill and decode steps of many sizes give the slope; the pod says that it learns."""
    latency = online(profile=False)
    rng = np.random.default_rng(0)
    assert latency.learning
    for step in range(300):
        batched = [1, 2, 3, 5, 8, 64][step % 6]
        shape = Shape(100 + step, batched, 1)
        latency.observe_target(shape, RAGGED, TARGET.seconds(shape) * math.exp(rng.normal(0, 0.05)))
    for batched in (1, 4, 16):
        shape = Shape(200, batched, 1)
        assert latency.target_s(shape, RAGGED) == pytest.approx(TARGET.seconds(shape), rel=0.12)


def test_a_mode_that_was_not_measured_uses_the_nearest_one():
    """A profile from the CPU has no graphs; asking for one must not fail."""
    latency = OnlineLatency(LatencyModel({UNIFORM: TARGET}), POOL, None)
    assert latency.target_s(ONE, ExecutionMode.BEYOND_GRAPH) == TARGET.seconds(ONE)


def test_graphs_that_end_have_a_price_of_their_own():
    """Beyond the largest captured graph other coefficients hold."""
    beyond = StepCost(per_batched_token_s=1e-3, constant_s=0.05)
    latency = OnlineLatency(LatencyModel({RAGGED: TARGET, ExecutionMode.BEYOND_GRAPH: beyond}), POOL, 8)
    price = latency.price(Shape(0, 4, 4), uniform=False)
    inside, outside = price.ragged_s(np.array([4.0, 5.0]))
    assert inside == pytest.approx(TARGET.seconds(Shape(0, 8, 4)))
    assert outside == pytest.approx(beyond.seconds(Shape(0, 9, 4)))


def test_a_first_draft_pass_covers_every_token_and_the_others_the_batch():
    """T_draft(K) = T_d(N_context, N_batched) + (K-1) * T_d(N_context, n); a lookup is one call."""
    first = Shape(1000, 40, 4)
    cost = StepCost(per_batched_token_s=1.0, constant_s=100.0)
    assert DrafterCost(cost).seconds(first, 3) == pytest.approx(140 + 2 * 104)
    assert DrafterCost(cost).seconds(first, 0) == pytest.approx(140)
    assert DrafterCost(cost, autoregressive=False).seconds(first, 3) == pytest.approx(140)
    head = DrafterCost(cost, first_pass=StepCost(per_batched_token_s=0.5, constant_s=7.0))
    assert head.seconds(first, 3) == pytest.approx(140 + 27 + 2 * 104)
    assert head.token_s(1) == 1.5


def test_a_first_pass_is_corrected_with_the_rest_of_the_draft():
    """A head that slows down costs more in its first pass, too."""
    head = DrafterCost(DRAFT.cost, first_pass=StepCost(constant_s=2e-3))
    latency = OnlineLatency(LatencyModel({RAGGED: TARGET}, {"eagle": head}), POOL, None)
    assert latency.draft_s("eagle", ONE, 2) == pytest.approx(head.seconds(ONE, 2))
    for _ in range(12):
        for tokens in (1, 3):
            latency.observe_draft("eagle", ONE, tokens, 3 * head.seconds(ONE, tokens))
    assert latency.draft_s("eagle", ONE, 1) == pytest.approx(3 * head.seconds(ONE, 1), rel=0.12)


def test_directions_without_data_stay_with_the_model():
    """At one steady shape intercept and slope cannot be told apart: neither may drift away."""
    multipliers = Multipliers(half_life=50, strength=0.3, likeness=0.6)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        multipliers.observe(0.01, 0.001, 0.011 * math.exp(rng.normal(0, 0.1)))
    assert multipliers.values == pytest.approx([1.0, 1.0], abs=0.1)


@pytest.mark.parametrize("requests", [3, 12])
def test_the_rate_of_plain_decoding_is_that_of_the_price_within_graphs_and_beyond(requests):
    latency, shape = online(graphs=8), Shape(100.0 * requests, requests, requests, requests / 10)
    for took_s in (0.02, 0.03, 0.04):
        latency.observe_target(shape, UNIFORM, took_s)
        latency.observe_decoding(shape, UNIFORM, took_s + 0.002, verifies=False)
        latency.observe_decoding(shape, UNIFORM, took_s + 0.005, verifies=True)
    assert latency.plain_rate(shape) == pytest.approx(requests / latency.price(shape, uniform=True).plain_s())
