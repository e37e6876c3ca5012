"""Which drafters run, and which request uses which: compared with every possible choice."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.control.choose_drafters import one_drafter_moves, variants
from outrider_runtime.control.draft_options import DraftOptions
from outrider_runtime.control.settings import Drafter
from outrider_runtime.control.slo import Need, none_behind
from outrider_runtime.control.trees import Beams, beams
from outrider_runtime.control.trials import upper_bounds
from outrider_runtime.control.value import Price

from tests.unit.control.columns import choose

EAGLE = Drafter("eagle", passes=True, needs_hidden=True)
DEPTHS = 3


def chains_only(drafters: int, depths: int) -> Beams:
    return beams(np.zeros((drafters, depths, 1, 2)), np.zeros((drafters, depths)), np.ones(drafters, np.int64))


def requests_last(columns):
    """(D, K, N), from (D, N, K)."""
    return np.ascontiguousarray(columns.transpose(0, 2, 1))


def pool(paths, passes, *, hit_rates=None, token=0.1, knee=None, rate=1.0, first=0.1, more=0.1, reads=0.0, **changes):
    """A pool whose step takes a second, and `token` seconds for each proposal, four times as much above `knee`. paths:
    (D, N, K). hit_rates: (D, K)."""
    paths = requests_last(np.array(paths, dtype=float))
    drafters, depths, requests = paths.shape
    count = np.arange(requests * depths + 1)
    seconds = 1.0 + token * count + (0.0 if knee is None else 3 * token * np.maximum(0, count - knee))
    price = Price(seconds, np.zeros(requests), rate, token)
    made = {
        "paths": paths, "hit_rates": np.ones((drafters, depths)) if hit_rates is None else hit_rates,
        "autoregressive": np.array(passes), "stands_in": np.array(passes),
        "first_s": np.full(drafters, first), "pass_s": np.where(passes, more, 0.0)[:, None],
        "token_s": np.where(passes, reads, 0.0), "price": price, "longest": depths,
        "budget": requests * depths, "need": none_behind(requests), "beams": chains_only(drafters, depths),
    }  # fmt: skip
    return DraftOptions(**(made | changes))


@st.composite
def pools(draw, *, models, lookups, blocks=0, knee=False):
    """Up to two requests, with chains of each drafter."""
    requests, drafters = draw(st.integers(1, 2)), models + blocks + lookups
    rate = st.sampled_from([0.05, 0.3, 0.6, 0.9])
    rates = np.array(draw(st.lists(rate, min_size=drafters * requests, max_size=drafters * requests)))
    paths = rates.reshape(drafters, requests, 1) ** np.arange(1, DEPTHS + 1)
    hit_rates = np.ones((drafters, DEPTHS))
    hit_rates[models + blocks :] = draw(st.sampled_from([0.1, 0.5, 1.0]))
    return pool(
        paths, [True] * models + [False] * (blocks + lookups), hit_rates=hit_rates,
        stands_in=np.arange(drafters) < models + blocks, token=draw(st.sampled_from([0.02, 0.2, 0.5])),
        knee=draw(st.sampled_from([1, 2])) if knee else None, first=draw(st.sampled_from([0.02, 0.3])),
        more=draw(st.sampled_from([0.02, 0.3])), reads=draw(st.sampled_from([0.0, 0.1])),
    )  # fmt: skip


def every_choice(options: DraftOptions):
    """Worth of every choice of passes, of the drafters that each request uses first and next, and of how many of their
    proposals are scored."""
    drafters, _, requests = options.paths.shape
    for passes in itertools.product(range(DEPTHS + 1), repeat=drafters):
        running = [d for d in range(drafters) if passes[d]]
        if any(not options.autoregressive[d] and passes[d] not in (0, DEPTHS) for d in range(drafters)):
            continue
        orders: list[tuple[tuple[int, int], ...]] = [()]
        for d in running:
            for verified in range(1, passes[d] + 1):
                orders.append(((d, verified),))
                if not options.stands_in[d]:
                    orders += [
                        ((d, verified), (m, n))
                        for m in running
                        if options.stands_in[m]
                        for n in range(1, passes[m] + 1)
                    ]
        for plan in itertools.product(orders, repeat=requests):
            yield worth_of(options, passes, plan)


def worth_of(options: DraftOptions, passes, plan) -> float:
    gain, tokens, none = 0.0, 0.0, 1.0
    for i, order in enumerate(plan):
        reach = 1.0
        for d, verified in order:
            gain += reach * float(options.hit_rates[d, :verified] @ options.paths[d, :verified, i])
            tokens += reach * float(options.hit_rates[d, :verified].sum())
            reach *= 1.0 - float(options.hit_rates[d, 0])
        none *= reach
    drafts_s = sum(options.first_s[d] + (p - 1) * options.pass_s[d, 0] for d, p in enumerate(passes) if p)
    if options.use_s.size:
        drafts_s += sum(passes[d] * options.use_s[d, i] for i, order in enumerate(plan) for d, _ in order)
    if options.catch_up_s.size:
        drafts_s += sum(options.catch_up_s[d, i] for i, order in enumerate(plan) for d, _ in order)
    reads_s = sum(options.token_s[d] for d, p in enumerate(passes) if p) * tokens
    seconds, price = options.price.target_s, options.price
    if tokens == 0.0:
        return float(-price.rate * (seconds[0] + drafts_s))
    if_any = max(1.0, tokens / (1 - none))
    target_s = none * seconds[0] + (1 - none) * np.interp(if_any, np.arange(len(seconds)), seconds)
    return float(gain - price.rate * (target_s + drafts_s + reads_s))


@given(pools(models=1, lookups=1))
@settings(max_examples=25, deadline=None)
def test_model_with_a_lookup_is_used_optimally(options):
    """Every token costs the same, and no other choice is worth more."""
    best = max(every_choice(options))
    assert math.isclose(choose(options).value, best, rel_tol=1e-9, abs_tol=0.02), (choose(options), best)


def every_placeholder_choice(options: DraftOptions):
    """Worth of every choice of passes of a model (0) and a lookup (1), of their order, and of the number of
    placeholders of each request, each of which costs a token."""
    requests, hit = options.paths.shape[2], options.hit_rates
    for passes in itertools.product(range(DEPTHS + 1), (0, DEPTHS)):
        running = [d for d in (0, 1) if passes[d]]
        orders = [(), *((d,) for d in running), *([(1, 0)] if len(running) == 2 else [])]
        paths = np.zeros((len(orders), DEPTHS, requests))
        for o, order in enumerate(orders):
            reach = 1.0
            for d in order:
                paths[o, : passes[d]] += reach * hit[d, : passes[d], None] * options.paths[d, : passes[d]]
                reach *= 1.0 - hit[d, 0]
        drafts_s = sum(options.first_s[d] + (passes[d] - 1) * options.pass_s[d, 0] for d in running)
        token_s = options.price.token_s + sum(options.token_s[d] for d in running)
        gain = np.zeros(requests)
        for length in range(1, DEPTHS + 1):
            worth_of_places = paths[:, :length].sum(axis=1) - options.price.rate * token_s * length
            gain = np.maximum(gain, worth_of_places.max(axis=0))
        yield float(gain.sum() - options.price.rate * (options.price.target_s[0] + drafts_s))


@given(pools(models=1, lookups=1))
@settings(max_examples=50, deadline=None)
def test_placeholders_are_used_optimally(options):
    """A placeholder costs a token whether the lookup finds anything or not, and lookup and model share it."""
    choice = choose(options._replace(scores_placeholders=True))
    assert choice.value == pytest.approx(max(every_placeholder_choice(options)), abs=1e-9)


def test_lookup_with_a_low_hit_rate_gets_no_placeholders():
    """Bug: with asynchronous scheduling every placeholder is scored, but a lookup was charged for its hits alone:
    goodput / plain goodput fell to 0.94. Here a hit is worth 0.8 tokens and a placeholder costs 0.2; one in ten is a
    hit."""
    paths, hit_rates = np.array([[[0.8, 0.6, 0.4]] * 4]), np.array([[0.1] * 3])
    options = pool(paths, [False], hit_rates=hit_rates, token=0.2, first=0.01)
    assert choose(options).draft_lengths.any()
    assert not choose(options._replace(scores_placeholders=True)).draft_lengths.any()


@given(pools(models=2, lookups=0))
@settings(max_examples=25, deadline=None)
def test_two_models_are_used_optimally(options):
    assert choose(options).value >= max(every_choice(options)) - 0.02


@given(st.one_of(pools(models=0, blocks=1, lookups=1), pools(models=1, blocks=1, lookups=0)))
@settings(max_examples=50, deadline=None)
def test_block_drafter_is_used_optimally(options):
    """Bug: a block drafter was treated as a lookup, so it never served requests that a lookup missed."""
    assert choose(options).value >= max(every_choice(options)) - 0.02


def test_block_drafter_serves_what_a_lookup_misses():
    """Bug: it ran instead of the lookup or not at all, like a second lookup."""
    paths, hit_rates = np.array([[[0.9, 0.8, 0.7]] * 4, [[0.7, 0.5, 0.4]] * 4]), np.array([[0.3] * 3, [1.0] * 3])
    options = pool(
        paths, [False, False], hit_rates=hit_rates, stands_in=np.array([False, True]), token=0.01, first=0.01
    )
    for scheduling in (options, options._replace(scores_placeholders=True)):
        assert choose(scheduling).drafter_order.tolist() == [[0] * 4, [1] * 4]


@given(pools(models=1, lookups=0, knee=True))
@settings(max_examples=25, deadline=None)
def test_search_near_a_knee_loses_less_than_a_token(options):
    """The search considers one price of a token only, so near a knee it drafts too much or too little. That loses less
    than 0.7 tokens per step, and no choice's worth is overstated. Which proposals are then scored is chosen exactly."""
    choice, best = choose(options), max(every_choice(options))
    assert best - 0.7 < choice.value <= best + 1e-9


@given(pools(models=1, lookups=1))
@settings(max_examples=25, deadline=None)
def test_k_0_is_always_an_option_and_wins_ties(options):
    """If nothing is gained, no drafter runs."""
    choice = choose(options)
    assert choice.value >= choice.plain_value
    if choice.gain == 0.0:
        assert not choice.draft_lengths.any()
        assert (choice.drafter_order == NO_DRAFTER).all()


@pytest.mark.slow
@given(pools(models=3, lookups=0))
@settings(max_examples=25, deadline=None)
def test_three_models_are_used_nearly_optimally(options):
    """The search moves one drafter at a time."""
    assert choose(options).value >= max(every_choice(options)) - 0.05


def test_search_looks_at_few_plans_of_a_large_pool():
    """Bug: every set of drafters was weighed at every length: 2,550 plans for eight models, and one decision took 15 ms
    at 512 requests."""
    models, longest = 8, 5
    pool_variants = variants(np.ones(models, bool), np.ones(models, bool), np.ones(models, np.int64))
    moves = one_drafter_moves(np.zeros(models, np.int64), pool_variants, longest)
    assert len(moves) == 1 + longest * (models + 1)
    assert len(np.unique(moves, axis=0)) == len(moves)


def test_request_uses_the_model_that_suits_it_best():
    """Two models of equal cost: one knows code, the other chat. Both run, each for its own requests."""
    paths = np.array([[[0.9, 0.8, 0.7]] * 4 + [[0.1, 0.0, 0.0]] * 4, [[0.1, 0.0, 0.0]] * 4 + [[0.9, 0.8, 0.7]] * 4])
    choice = choose(pool(paths, [True, True], token=0.01))
    assert choice.drafter_order[0].tolist() == [0] * 4 + [1] * 4
    assert (choice.draft_lengths == 3).all()


def test_second_model_that_does_not_pay_does_not_run():
    paths = np.array([[[0.8, 0.6, 0.5]] * 2, [[0.82, 0.6, 0.5]] * 2])
    choice = choose(pool(paths, [True, True], token=0.01))
    assert (choice.draft_lengths > 0).sum() == 1


def test_model_serves_requests_that_a_lookup_misses():
    """The model runs for other requests anyway, so a request has the lookup first and the model second."""
    paths = np.array([[[0.6, 0.4, 0.2]] * 4, [[0.95, 0.9, 0.85]] * 4])
    hit_rates = np.array([[1.0] * 3, [0.3] * 3])
    choice = choose(pool(paths, [True, False], hit_rates=hit_rates, token=0.01, first=0.02))
    assert choice.drafter_order.tolist() == [[1] * 4, [0] * 4]


def test_lambda_of_0_drafts_everything():
    """Lambda is 0 before the first step if there is no profile."""
    choice = choose(pool([[[0.8, 0.6, 0.4]] * 4], [True], rate=0.0))
    assert choice.value == pytest.approx(4 * 1.8)
    assert choice.draft_lengths.tolist() == [3]


def test_late_request_comes_before_goodput():
    """No token pays for goodput; the late request still gets as many as it needs."""
    paths = np.array([[[0.9, 0.8, 0.7]] * 2])
    assert not choose(pool(paths, [True], token=0.5, rate=2.0)).draft_lengths.any()
    need = Need(np.array([True, False]), np.array([0.5, -9.0]), np.array([0.1, 0.1]))
    paths[0, 1] = 0.0  # nothing may be proposed for the other request
    choice = choose(pool(paths, [True], token=0.5, rate=2.0, need=need))
    assert choice.for_slo
    assert choice.drafter_order[0].tolist() == [0, NO_DRAFTER]


@given(
    st.one_of(pools(models=2, lookups=0), pools(models=1, lookups=1)),
    st.lists(st.sampled_from([0.0, 0.02, 0.2]), min_size=4, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_request_with_its_own_price_is_drafted_for_if_it_pays(options, use):
    """If a drafter's passes hold only the requests that use it, each request has its own price."""
    use_s = np.array(use).reshape(2, 2)[:, : options.paths.shape[2]] * options.autoregressive[:, None]
    options = options._replace(use_s=use_s)
    assert choose(options).value >= max(every_choice(options)) - 0.02


@given(
    st.one_of(pools(models=2, lookups=0), pools(models=1, lookups=1)),
    st.lists(st.sampled_from([0.0, 0.02, 0.2, 1.0]), min_size=4, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_kv_gap_is_closed_if_that_pays(options, gaps):
    """Each request's gap in a model's cache has a price; no other choice is worth more."""
    catch_up_s = np.array(gaps).reshape(2, 2)[:, : options.paths.shape[2]] * options.autoregressive[:, None]
    options = options._replace(catch_up_s=catch_up_s)
    assert choose(options).value >= max(every_choice(options)) - 0.02


def test_gaps_of_all_requests_pay_together():
    """Neither request's gain pays for the passes alone. If a step's part of catching up costs more than that, k = 0."""
    options = pool(np.array([[[0.8, 0.6, 0.4]] * 2]), [True], token=0.01, first=0.9, more=0.01)
    assert choose(options._replace(catch_up_s=np.full((1, 2), 0.3))).drafter_order[0].tolist() == [0, 0]
    assert choose(options._replace(catch_up_s=np.array([[0.3, 2.0]]))).drafter_order[0].tolist() == [0, NO_DRAFTER]
    assert not choose(options._replace(catch_up_s=np.full((1, 2), 1.4))).draft_lengths.any()


def test_expensive_model_is_not_used_behind_a_reliable_lookup():
    """Bug: the model's passes were priced as if they ran only for misses of the lookup."""
    paths = np.array([[[0.7, 0.5, 0.4]] * 2, [[0.9, 0.8, 0.7]] * 2])
    hit_rates = np.array([[1.0] * 3, [0.9] * 3])
    options = pool(paths, [True, False], hit_rates=hit_rates, token=0.01, first=0.01, more=0.01)
    assert choose(options).drafter_order.tolist() == [[1, 1], [0, 0]]
    choice = choose(options._replace(use_s=np.array([[0.01, 0.3], [0.0, 0.0]])))
    assert choice.drafter_order.tolist() == [[1, 1], [0, NO_DRAFTER]]


def test_requests_with_expensive_contexts_use_no_drafter():
    paths = np.array([[[0.7, 0.5, 0.4]] * 4])
    use_s = np.array([[0.05, 0.05, 0.9, 0.9]])
    choice = choose(pool(paths, [True], token=0.01, use_s=use_s))
    assert choice.drafter_order[0].tolist() == [0, 0, NO_DRAFTER, NO_DRAFTER]


def test_upper_bound_of_a_drafter_pays_for_its_gaps():
    """Bug: exploration ignored what it takes to feed a drafter, and tried it where no acceptance would pay for that."""
    options = pool(np.array([[[0.8, 0.6, 0.4]] * 2]), [True], token=0.01, first=0.1, more=0.01, rate=2.0)
    upper = np.array([[0.9, 0.8, 0.7]])
    bound = upper_bounds(options, upper, DEPTHS)[0]
    gaps = options._replace(catch_up_s=np.array([[0.3, 0.2]]))
    assert upper_bounds(gaps, upper, DEPTHS)[0] == pytest.approx(bound - 2.0 * 0.5)
    unserved = gaps._replace(paths=gaps.paths * np.array([1.0, 0.0]))
    alone = options._replace(paths=unserved.paths)
    assert upper_bounds(unserved, upper, DEPTHS)[0] == pytest.approx(upper_bounds(alone, upper, DEPTHS)[0] - 2.0 * 0.3)
