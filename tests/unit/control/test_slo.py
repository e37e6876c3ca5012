"""Selection for SLO classes: who is behind is served first within the budget, and what prompts a step may take."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.choice import TargetPrice, best_lengths
from outrider_runtime.control.costs import StepCost
from outrider_runtime.control.slo import (
    MARGIN,
    MOST_FORCED,
    Clocks,
    behind,
    clocks,
    forced_lengths,
    least_chunk,
    longest_step_s,
    prompt_tokens,
)

from tests.unit.control.test_choice import chains, worth

CPU = StepCost(per_batched_token_s=2e-3, constant_s=12.5e-3)


def price(requests: int, cost: StepCost = CPU) -> TargetPrice:
    return TargetPrice(requests, None, cost, None, float("inf"), cost.constant_s, cost.constant_s, 0.0)


@st.composite
def standings(draw, requests: int) -> Clocks:
    """Requests ahead of their class, behind it, hopeless, and without one."""
    numbers = st.lists(st.floats(0.0, 3.0), min_size=requests, max_size=requests)
    tokens = np.array(draw(st.lists(st.integers(0, 60), min_size=requests, max_size=requests)), dtype=float)
    tpot = np.array(draw(st.lists(st.sampled_from([0.02, 0.05, np.inf]), min_size=requests, max_size=requests)))
    left = np.array(draw(st.lists(st.integers(1, 80), min_size=requests, max_size=requests)), dtype=float)
    return Clocks(tpot, np.array(draw(numbers)), tokens, left)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(0, 14))
def test_those_behind_get_what_they_need_and_nobody_more_than_the_budget(data, requests, positions, budget):
    """AdaServe, algorithm 2, on chains: the shortest prefix that suffices, n_max at most, the slowest first."""
    gains = data.draw(chains(requests, positions))
    state = data.draw(standings(requests))
    step_s = data.draw(st.floats(0.005, 0.08))
    who = behind(state, step_s, gains)
    ample = forced_lengths(state, who, step_s, gains, price(requests), 10**6)
    needed = np.minimum(state.needed(step_s), positions + 1)
    assert (ample[~who] == 0).all()
    assert (ample <= np.minimum((gains > 0).sum(axis=0), MOST_FORCED)).all()
    for request in np.flatnonzero(ample):
        assert 1 + gains[: ample[request] - 1, request].sum() < needed[request], "a shorter prefix would do"
    forced = forced_lengths(state, who, step_s, gains, price(requests), budget)
    assert forced.sum() == min(budget, ample.sum())
    assert (forced <= ample).all()
    slowest_first = np.argsort(-needed, kind="stable")
    cut = [request for request in slowest_first if forced[request] < ample[request]]
    if cut:
        assert all(forced[later] == 0 for later in itertools.dropwhile(lambda one: one != cut[0], slowest_first)
                   if later != cut[0])  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.floats(1.0, 120.0), st.integers(0, 10))
def test_the_gain_phase_is_the_best_there_is_around_what_is_forced(data, requests, positions, rate, budget):
    """Among all plans that hold the forced positions and end in time: none is worth more."""
    gains = data.draw(chains(requests, positions))
    limits = (gains > 0).sum(axis=0)
    forced = np.array([data.draw(st.integers(0, int(limit))) for limit in limits])
    while forced.sum() > budget:
        forced[forced.argmax()] -= 1
    around = price(requests)
    least = float(around.ragged_s(np.array(float(forced.sum()))))
    longest = data.draw(st.sampled_from([np.inf, least, least + 0.003, least + 0.009]))
    zeros = np.zeros(requests)
    found = best_lengths(gains, zeros, around, rate, budget, forced=forced, longest_s=longest)
    assert (found.lengths >= forced).all()
    assert found.lengths.sum() <= budget
    best = -np.inf
    for lengths in itertools.product(*(range(least, most + 1) for least, most in zip(forced, limits, strict=True))):
        seconds = float(around.ragged_s(np.array(float(sum(lengths)))))
        in_time = seconds <= longest or lengths == tuple(forced)
        if sum(lengths) <= budget and in_time:
            best = max(best, worth(lengths, gains, zeros, around, rate, uniform=False))
    assert found.value == pytest.approx(best, abs=1e-9)


def test_a_hopeless_request_competes_for_goodput_like_any_other():
    """It would take what those need that can still make it."""
    gains = np.full((2, 2), 0.5)
    late, hopeless = 1.03, 9.0
    state = Clocks(np.full(2, 0.05), np.array([late, hopeless]), np.full(2, 20.0), np.full(2, 40.0))
    assert behind(state, 0.04, gains).tolist() == [True, False]


def test_a_position_that_slows_its_own_request_is_not_forced():
    """On hardware where every token costs, verifying an unlikely one makes the late request later."""
    state = Clocks(np.array([0.05]), np.array([1.1]), np.array([20.0]), np.array([40.0]))
    unlikely, likely = np.array([[0.05]]), np.array([[0.6]])
    who = np.array([True])
    assert forced_lengths(state, who, 0.03, unlikely, price(1), 10).tolist() == [0]
    assert forced_lengths(state, who, 0.03, likely, price(1), 10).tolist() == [1]


def test_goodput_adds_nothing_that_makes_a_class_miss():
    """Loose requests may extend the step only as long as the tight one's tokens come in time."""
    state = Clocks(np.array([0.05, np.inf]), np.array([0.99, 0.0]), np.array([20.0, 20.0]), np.array([9.0, 9.0]))
    gains = np.array([[0.8, 0.9], [0.6, 0.8]])
    forced = np.array([1, 0])
    limit = longest_step_s(state, forced, gains, price(2), draft_s=0.002)
    assert limit == pytest.approx(0.05 * 21.8 - 0.99 - 0.002)
    hopeless = Clocks(state.tpot_s, state.elapsed_s + 5, state.tokens, state.left)
    assert longest_step_s(hopeless, forced, gains, price(2), 0.0) == float("inf")


def test_the_clock_starts_with_the_first_token():
    """TPOT counts from there: a request without a token cannot be behind, nor one without a class."""
    state = clocks(("chat", "chat", None), (0.0, 0.3, 9.0), (0, 4, 4), (9, 9, 9), {"chat": 0.1})
    assert state is not None
    assert state.needed(0.05).tolist() == pytest.approx([0, 0.35 / (MARGIN * 0.1) - 3, -3])
    assert clocks((None, "old"), (1.0, 1.0), (4, 4), (9, 9), {"chat": 0.1}) is None


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(0, 8), st.integers(0, 600))
def test_a_chunk_of_prompt_breaks_no_tpot_that_can_bear_the_least_one(data, requests, verified, most):
    """Whoever would end in time after the least chunk does so after the one that is taken."""
    state = data.draw(standings(requests))
    gained = np.array(data.draw(st.lists(st.floats(1.0, 4.0), min_size=requests, max_size=requests)))
    around = price(requests)
    room = prompt_tokens(state, gained, verified, around, 0.001, 1e-4, most)
    smallest = least_chunk(around, verified)
    assert min(most, smallest) <= room <= most
    without, least, holding = around.ragged_s(np.array([0.0, smallest, room]) + verified)
    slack_s = state.slack_s(without + 0.001, gained)
    bearing = slack_s >= least - without + 1e-4 * smallest + 1e-9
    if room > smallest:
        assert (slack_s[bearing] >= holding - without + 1e-4 * room - 1e-9).all()


def test_prompts_take_the_whole_step_where_no_class_is_tight():
    """No class, one with time to spare, and one that is lost anyway: the engine's own budget holds."""
    around = price(1)
    for state in (
        Clocks(np.array([np.inf]), np.array([3.0]), np.array([5.0]), np.array([50.0])),
        Clocks(np.array([0.5]), np.array([0.5]), np.array([50.0]), np.array([50.0])),
        Clocks(np.array([0.01]), np.array([9.0]), np.array([5.0]), np.array([50.0])),
    ):
        assert prompt_tokens(state, np.ones(1), 0, around, 0.0, 0.0, most=512) == 512
