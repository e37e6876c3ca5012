"""The choice of lengths is the best there is for the model, within every budget."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.choice import TargetPrice, best_lengths, values_by_draft_length
from outrider_runtime.control.costs import StepCost
from outrider_runtime.control.decision import LEAST_GAIN, choose_draft
from outrider_runtime.control.drafting import NOBODY, DraftProblem

COSTS = st.builds(
    StepCost,
    per_batched_token_s=st.floats(1e-4, 0.02),
    per_batched_token_above_knee_s=st.sampled_from([0.0, 0.005, 0.02]),
    knee_tokens=st.integers(0, 12).map(float),
    constant_s=st.floats(0.001, 0.03),
)


@st.composite
def prices(draw, requests: int, *, bends: bool = True) -> TargetPrice:
    ragged = draw(COSTS)
    if not bends:
        ragged = replace(ragged, per_batched_token_above_knee_s=0.0)
    uniform = draw(st.none() | COSTS) if bends else draw(st.sampled_from([None, ragged]))
    beyond = draw(st.none() | COSTS) if bends else None
    return TargetPrice(
        n_batched=float(requests),
        uniform=uniform,
        ragged=ragged,
        beyond=beyond,
        largest_graph_tokens=draw(st.integers(1, 12)) if beyond else float("inf"),
        fixed_uniform_s=(uniform or ragged).constant_s,
        fixed_ragged_s=ragged.constant_s,
        fixed_beyond_s=beyond.constant_s if beyond else 0.0,
    )


@st.composite
def chains(draw, requests: int, positions: int) -> np.ndarray:
    """(K, N) products of hazards; each request's chain ends somewhere."""
    hazards = np.array(
        draw(st.lists(st.floats(0.05, 0.99), min_size=requests * positions, max_size=requests * positions))
    )
    gains = hazards.reshape(positions, requests).cumprod(axis=0)
    lengths = np.array(draw(st.lists(st.integers(0, positions), min_size=requests, max_size=requests)))
    return np.where(np.arange(positions)[:, None] < lengths, gains, 0.0)


def worth(lengths, gains, query, price: TargetPrice, rate: float, *, uniform: bool) -> float:
    tokens = sum(gains[:length, i].sum() - rate * query[i] * length for i, length in enumerate(lengths))
    seconds = price.uniform_s if uniform else price.ragged_s
    return float(tokens - rate * seconds(np.array(float(sum(lengths)))))


def exhaustive(gains, query, price: TargetPrice, rate: float, budget: int) -> float:
    """The best worth of all lengths there are, ragged and uniform."""
    most = (gains > 0).sum(axis=0)
    best = -np.inf
    for lengths in itertools.product(*(range(limit + 1) for limit in most)):
        if sum(lengths) > max(0, budget):
            continue
        best = max(best, worth(lengths, gains, query, price, rate, uniform=False))
        if price.uniform is not None and len(set(lengths)) == 1:
            best = max(best, worth(lengths, gains, query, price, rate, uniform=True))
    return best


@given(st.data(), st.integers(1, 6), st.integers(0, 9), st.integers(0, 20))
def test_a_run_of_prices_is_that_of_its_numbers_one_by_one(data, requests, first, more):
    """Knees and the end of the graphs wherever they lie."""
    price = data.draw(prices(requests))
    one_by_one = price.ragged_s(np.arange(first, first + more + 1, dtype=float))
    assert price.ragged_run_s(first, first + more) == pytest.approx(one_by_one)


def dearer_beyond_the_graphs(price: TargetPrice) -> bool:
    """Where eager steps cost less than graphs, a worthless token could save time: no such hardware is asked for."""
    if price.beyond is None:
        return True
    edge = np.array([0.0, 1e-3]) + max(0.0, price.largest_graph_tokens - price.n_batched)
    inside, outside = price.ragged_s(edge)
    return bool(price.beyond.per_batched_token_s >= price.ragged.per_batched_token_s and outside >= inside)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.floats(1.0, 120.0), st.integers(-1, 12))
def test_no_other_lengths_are_worth_more(data, requests, positions, rate, budget):
    """Design, choice of lengths: the joint choice equals exhaustive search, knees and graphs included."""
    gains = data.draw(chains(requests, positions))
    price = data.draw(prices(requests))
    query = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.001, 0.01]), min_size=requests, max_size=requests)))
    if price.beyond is not None:
        query = np.zeros(requests)
    found = best_lengths(gains, query, price, rate, budget)
    assert (found.lengths <= (gains > 0).sum(axis=0)).all()
    assert found.lengths.sum() <= max(0, budget)
    best = exhaustive(gains, query, price, rate, budget)
    if dearer_beyond_the_graphs(price):
        assert found.value == pytest.approx(best, abs=1e-9)


@settings(max_examples=70, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.floats(1.0, 120.0))
def test_draft_lengths_are_valued_as_exhaustive_search_values_them(data, requests, positions, rate):
    """For every K the value is that of the best verification lengths up to K."""
    gains = data.draw(chains(requests, positions))
    price = data.draw(prices(requests, bends=False))
    query = np.zeros(requests)
    values = values_by_draft_length(gains[None], np.ones_like(gains)[None], query[None], price, rate, budget=100)[0]
    for length in range(positions + 1):
        best = exhaustive(gains[:length], query, price, rate, budget=100)
        assert values[length] == pytest.approx(best, abs=1e-9)


@settings(max_examples=70, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.floats(1.0, 120.0), st.integers(0, 12))
def test_a_bend_in_the_cost_never_makes_a_draft_length_look_better_than_it_is(data, requests, positions, rate, budget):
    """Across a knee or a budget values are read off chords: at most the truth, and never under k = 0."""
    gains = data.draw(chains(requests, positions))
    price = data.draw(prices(requests))
    price = replace(price, beyond=None, uniform=None, fixed_uniform_s=price.fixed_ragged_s)
    query = np.zeros(requests)
    values = values_by_draft_length(gains[None], np.ones_like(gains)[None], query[None], price, rate, budget)[0]
    for length in range(positions + 1):
        best = exhaustive(gains[:length], query, price, rate, budget)
        assert values[0] - 1e-9 <= values[length] <= best + 1e-9


def problem(gains, draft_s, *, rate, per_token_s, neural=NOBODY, usable=None, neural_token_s=0.0):
    drafters, _, requests = gains.shape
    cost = StepCost(per_batched_token_s=per_token_s, constant_s=0.01)
    return DraftProblem(
        gains=gains,
        offers=np.ones_like(gains),
        usable=np.ones((drafters, requests), dtype=bool) if usable is None else usable,
        neural=neural,
        draft_s=np.array([[0.0, *seconds] for seconds in draft_s]),
        query_costs_s=np.zeros(requests),
        neural_token_s=neural_token_s,
        price=TargetPrice(float(requests), cost, cost, None, float("inf"), 0.01, 0.01, 0.0),
        rate=rate,
        budget=100,
    )


def exhaustive_drafters(case: DraftProblem) -> float:
    """The best worth over all drafters per request, draft lengths of lookup and neural draft, whether the neural draft
    runs to stand in for lookups that find nothing, and verification lengths; ragged and uniform."""
    drafters, positions, requests = case.gains.shape
    best = -case.rate * case.price.plain_s()
    for chosen in itertools.product(range(-1, drafters), repeat=requests):
        if any(drafter >= 0 and not case.usable[drafter, request] for request, drafter in enumerate(chosen)):
            continue
        for lengths in itertools.product(range(1, positions + 1), range(positions + 1)):
            if (case.neural in chosen) <= (lengths[1] > 0):
                best = max(best, worth_of(case, chosen, lengths))
    return best


def worth_of(case: DraftProblem, chosen, lengths) -> float:
    """What `chosen` (N,) drafters are worth that propose lengths[is neural] tokens each, verified as is best. Where a
    lookup has a proposal only at times (offers), a position costs and gains in that proportion; the rest of the time
    the neural draft's proposals stand in, if it runs."""
    used = {drafter for drafter in chosen if drafter >= 0} | ({case.neural} if lengths[1] else set())
    query = case.query_costs_s + (case.neural_token_s if lengths[1] else 0.0)
    draft_s = sum(case.draft_s[drafter, lengths[drafter == case.neural]] for drafter in used)
    worth = -case.rate * _fixed_s(case, chosen, neural_runs=lengths[1] > 0)
    for request, drafter in enumerate(chosen):
        if drafter >= 0:
            worth += worth_of_request(case, drafter, request, lengths[drafter == case.neural], query)
        if drafter not in (NOBODY, case.neural) and lengths[1] and case.usable[case.neural, request]:
            missed = 1 - case.offers[drafter, 0, request]
            worth += missed * worth_of_request(case, case.neural, request, lengths[1], query)
    if case.price.uniform is not None and set(chosen) == {case.neural}:
        for k in range(lengths[1] + 1):
            net = case.gains[case.neural, :k] - case.rate * query
            value = net.sum() - case.rate * float(case.price.uniform_s(np.array(float(k * len(chosen)))))
            if (case.gains[case.neural, :k] > 0).all():
                worth = max(worth, value)
    return float(worth - case.rate * draft_s)


def _fixed_s(case: DraftProblem, chosen, *, neural_runs: bool) -> float:
    """Seconds of the step without its proposals' tokens: where all lookups find nothing it is a plain one."""
    misses = [1 - float(case.offers[drafter, 0, request]) for request, drafter in enumerate(chosen) if drafter >= 0]
    nothing = 0.0 if neural_runs else math.prod(misses)
    return nothing * case.price.plain_s() + (1 - nothing) * case.price.ragged_plain_s()


def worth_of_request(case: DraftProblem, drafter: int, request: int, length: int, query) -> float:
    price = case.price.ragged.per_batched_token_s + query[request]
    net = case.gains[drafter, :length, request] - case.rate * price
    return float((np.maximum(net, 0) * case.offers[drafter, :length, request]).sum())


@settings(max_examples=70, deadline=None)
@given(
    st.data(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(5.0, 100.0),
    st.floats(1e-4, 5e-3),
    st.sampled_from([0.0, 1e-3]),
)
def test_one_drafter_is_used_as_exhaustive_search_would(data, requests, positions, rate, per_token, pass_s):
    """K and who speculates are jointly the best there is, the draft's own time included."""
    gains = data.draw(chains(requests, positions))[None]
    steps = data.draw(st.lists(st.floats(0.0, 0.01), min_size=positions, max_size=positions))
    case = problem(gains, [np.cumsum(steps)], rate=rate, per_token_s=per_token, neural=0, neural_token_s=pass_s)
    choice = choose_draft(case)
    assert choice.value == pytest.approx(exhaustive_drafters(case), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.floats(5.0, 100.0))
def test_the_joint_choice_is_the_best_there_is(data, requests, positions, rate):
    """Drafter per request, a length for lookup and one for the neural draft, and what is verified: exhaustive search
    over all of them finds nothing worth more, and the plan is worth what it says."""
    gains = np.stack([data.draw(chains(requests, positions)) for _ in range(2)])
    hits = data.draw(st.lists(st.sampled_from([0.3, 0.7, 1.0]), min_size=requests, max_size=requests))
    usable = np.array(data.draw(st.lists(st.booleans(), min_size=2 * requests, max_size=2 * requests)))
    passes = data.draw(st.lists(st.floats(0.0, 0.01), min_size=positions, max_size=positions))
    call = data.draw(st.sampled_from([0.0, 0.002]))
    cost = StepCost(per_batched_token_s=data.draw(st.floats(1e-4, 5e-3)), constant_s=0.01)
    even = data.draw(st.sampled_from([None, replace(cost, constant_s=0.004)]))
    case = DraftProblem(
        gains=gains,
        offers=np.stack([np.broadcast_to(hits, (positions, requests)), np.ones((positions, requests))]),
        usable=usable.reshape(2, requests),
        neural=1,
        draft_s=np.stack([[0.0] + [call] * positions, [0.0, *np.cumsum(passes)]]),
        query_costs_s=np.array(data.draw(st.sampled_from([[0.0] * 3, [0.0, 1e-3, 3e-3]])))[:requests],
        neural_token_s=data.draw(st.sampled_from([0.0, 1e-3])),
        price=TargetPrice(
            float(requests), even, cost, None, float("inf"), (even or cost).constant_s, cost.constant_s, 0.0
        ),
        rate=rate,
        budget=100,
    )
    choice = choose_draft(case)
    best = exhaustive_drafters(case)
    assert choice.value == pytest.approx(best, abs=max(1e-9, LEAST_GAIN))
    assert 0 <= choice.neural_tokens <= choice.draft_tokens
    if choice.draft_tokens:
        worth = worth_of(case, choice.drafters.tolist(), (choice.draft_tokens, choice.neural_tokens))
        assert worth == pytest.approx(choice.value, abs=1e-9)
    for request, drafter in enumerate(choice.drafters):
        assert drafter == NOBODY or case.usable[drafter, request]


def bent_worth(case: DraftProblem, chosen, lengths) -> float:
    """The most that `chosen` (N,) drafters are worth with a neural draft of lengths[1] tokens behind the lookups,
    however much is verified, the best first: each proposal counts, and takes time, as often as it is there."""
    neural_runs = lengths[1] > 0
    entries = [
        (drafter, request, 1.0, lengths[drafter == case.neural])
        for request, drafter in enumerate(chosen)
        if drafter >= 0
    ]
    entries += [
        (case.neural, request, 1 - case.offers[drafter, 0, request], lengths[1])
        for request, drafter in enumerate(chosen)
        if neural_runs and drafter not in (NOBODY, case.neural) and case.usable[case.neural, request]
    ]
    used = {drafter for drafter in chosen if drafter >= 0} | ({case.neural} if neural_runs else set())
    draft_s = sum(case.draft_s[drafter, lengths[drafter == case.neural]] for drafter in used)
    token_s = case.query_costs_s + (case.neural_token_s if neural_runs else 0.0)
    there = [
        (
            case.gains[drafter, position, request] - case.rate * token_s[request],
            share * case.offers[drafter, position, request],
        )
        for drafter, request, share, length in entries
        for position in range(length)
    ]
    there.sort(key=lambda one: -one[0])
    tokens = np.cumsum([0.0, *(often for _, often in there)])
    gained = np.cumsum([0.0, *(net * often for net, often in there)])
    amounts = np.append(tokens, min(case.price.ragged.knee_tokens - case.price.n_batched, tokens[-1]))
    best = (np.interp(amounts, tokens, gained) - case.rate * case.price.ragged_s(amounts)).max()
    return float(best - case.rate * draft_s)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 2), st.floats(5.0, 100.0), st.sampled_from([0.002, 0.01]), st.floats(0.0, 0.004))
def test_across_a_knee_no_choice_is_worth_less_than_it_says(data, requests, rate, above_knee, pass_s):
    """Nor than none; a lookup that finds nothing leaves its place to the neural draft there, too."""
    positions = 2
    gains = np.stack([data.draw(chains(requests, positions)) for _ in range(2)])
    hits = data.draw(st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=requests, max_size=requests))
    cost = StepCost(
        per_batched_token_s=5e-4, per_batched_token_above_knee_s=above_knee, constant_s=0.01,
        knee_tokens=requests + data.draw(st.sampled_from([0.5, 1.0, 2.0])),
    )  # fmt: skip
    case = replace(
        problem(gains, [[1e-4] * positions, [pass_s, 2 * pass_s]], rate=rate, per_token_s=5e-4, neural=1),
        offers=np.stack([np.broadcast_to(hits, (positions, requests)), np.ones((positions, requests))]),
        price=TargetPrice(float(requests), None, cost, None, float("inf"), 0.01, 0.01, 0.0),
        neural_token_s=data.draw(st.sampled_from([0.0, 5e-4])),
    )  # fmt: skip
    choice = choose_draft(case)
    if not choice.draft_tokens:
        return
    assert choice.value >= choice.plain_value
    worth = bent_worth(case, choice.drafters.tolist(), (choice.draft_tokens, choice.neural_tokens))
    assert choice.value <= worth + 1e-9


def test_a_knee_that_no_proposal_reaches_changes_nothing():
    """Bug: wherever a knee lay within reach of all that could be proposed, no neural draft stood in for a lookup."""
    gains = np.zeros((2, 3, 2))
    gains[0] = [[0.9] * 2, [0.8] * 2, [0.7] * 2]
    gains[1, 0] = 0.6
    straight = problem(gains, [[1e-4] * 3, [1e-3, 3e-3, 5e-3]], rate=70, per_token_s=0.001, neural=1)
    straight.offers[0] = 0.1
    cost = replace(straight.price.ragged, per_batched_token_above_knee_s=0.02, knee_tokens=5.0)
    bent = replace(straight, price=replace(straight.price, ragged=cost, uniform=cost))
    expected, choice = choose_draft(straight), choose_draft(bent)
    assert choice.drafters.tolist() == expected.drafters.tolist() == [0, 0]
    assert (choice.draft_tokens, choice.neural_tokens) == (expected.draft_tokens, expected.neural_tokens)
    assert choice.value == pytest.approx(expected.value)


def test_the_neural_draft_stops_where_its_next_pass_does_not_pay():
    """One lookup call brings eight tokens; a pass of the neural draft brings one. Each has its own length."""
    gains = np.zeros((2, 4, 2))
    gains[0, :, 0] = [0.9, 0.85, 0.8, 0.75]
    gains[1, :, 1] = [0.7, 0.3, 0.1, 0.05]
    case = problem(gains, [[1e-4] * 4, [2e-3, 4e-3, 6e-3, 8e-3]], rate=70, per_token_s=0.001, neural=1)
    choice = choose_draft(case)
    assert (choice.draft_tokens, choice.neural_tokens) == (4, 2)
    assert choice.drafters.tolist() == [0, 1]


def test_each_request_gets_the_drafter_that_suits_it():
    """Pool: prompt lookup for the request that repeats its prompt, the neural draft for the other, in one step."""
    gains = np.zeros((2, 2, 2))
    gains[0, :, 0] = [0.9, 0.8]  # lookup suits request 0
    gains[1, :, 1] = [0.8, 0.64]  # neural suits request 1
    case = problem(gains, [[0.0001, 0.0001], [0.001, 0.002]], rate=70, per_token_s=0.001, neural=1)
    choice = choose_draft(case)
    assert choice.drafters.tolist() == [0, 1]
    assert choice.value == pytest.approx(exhaustive_drafters(case))


def test_a_lookup_goes_first_where_the_neural_draft_stands_in_for_it():
    """Where a lookup finds something it brings more than the neural draft, and it costs nothing to ask."""
    gains = np.zeros((2, 3, 2))
    gains[0] = [[0.9] * 2, [0.8] * 2, [0.7] * 2]
    gains[1, 0] = 0.6
    case = problem(gains, [[1e-4] * 3, [1e-3, 3e-3, 5e-3]], rate=70, per_token_s=0.001, neural=1)
    case.offers[0] = 0.1
    choice = choose_draft(case)
    assert choice.drafters.tolist() == [0, 0]
    assert (choice.draft_tokens, choice.neural_tokens) == (3, 1)
    assert choice.value == pytest.approx(exhaustive_drafters(case))


def test_the_neural_draft_does_not_run_for_a_gain_that_its_time_eats():
    """The forward covers the whole batch, so it runs only if what it adds over the lookups pays for it."""
    gains = np.zeros((2, 1, 2))
    gains[0] = [[0.5, 0.5]]
    gains[1] = [[0.55, 0.55]]
    case = problem(gains, [[0.0001], [0.01]], rate=70, per_token_s=0.001, neural=1)
    assert choose_draft(case).drafters.tolist() == [0, 0]


def test_a_drafter_that_may_not_run_is_not_chosen():
    """Suspended drafters, and the neural one for requests whose draft KV has holes."""
    gains = np.full((1, 2, 2), 0.9)
    usable = np.array([[True, False]])
    case = problem(gains, [[0.0, 0.0]], rate=50, per_token_s=0.001, neural=0, usable=usable)
    assert choose_draft(case).drafters.tolist() == [0, NOBODY]


def test_speculation_stops_where_the_batch_fills_the_hardware():
    """TurboSpec, figure 5a: long proposals for small batches, short ones and none for large ones."""
    cost = StepCost(per_batched_token_s=1e-5, per_batched_token_above_knee_s=2e-3, knee_tokens=16, constant_s=0.01)
    totals = []
    for requests in (1, 4, 8, 16):
        gains = np.repeat(np.cumprod(np.full(6, 0.7))[:, None], requests, axis=1)
        price = TargetPrice(float(requests), None, cost, None, float("inf"), 0.01, 0.01, 0.0)
        rate = requests / price.plain_s()
        totals.append(best_lengths(gains, np.zeros(requests), price, rate, 1000).lengths.mean())
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == 6
    assert totals[-1] == 0
