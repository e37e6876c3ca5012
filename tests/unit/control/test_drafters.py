"""Which drafters run and who asks whom: against every choice there is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.acceptance.trees import Beams, beams
from outrider_runtime.control.cost.model import DrafterCost, StepCost
from outrider_runtime.control.data.batch import NOBODY
from outrider_runtime.control.selection.candidates import one_drafter_moves, variants
from outrider_runtime.control.selection.drafters import choose
from outrider_runtime.control.selection.offers import Pool
from outrider_runtime.control.settings import Drafter
from outrider_runtime.control.slo import Need, nobody_behind
from outrider_runtime.control.value import Price

from tests.unit.control.columns import batch
from tests.unit.control.engine import controller, profile

EAGLE = Drafter("eagle", passes=True, needs_hidden=True)
DEPTHS = 3


def chains_only(drafters: int, depths: int) -> Beams:
    return beams(np.zeros((drafters, depths, 1, 2)), np.zeros((drafters, depths)), np.ones(drafters, np.int64))


def requests_last(columns):
    """(D, K, N), from (D, N, K)."""
    return np.ascontiguousarray(columns.transpose(0, 2, 1))


def pool(paths, passes, *, offers=None, token=0.1, knee=None, rate=1.0, first=0.1, more=0.1, reads=0.0, **changes):
    """A pool whose step takes a second, and `token` for each proposal: four times as much beyond `knee`. paths:
    (D, N, K); offers: (D, K)."""
    paths = requests_last(np.array(paths, dtype=float))
    drafters, depths, requests = paths.shape
    count = np.arange(requests * depths + 1)
    seconds = 1.0 + token * count + (0.0 if knee is None else 3 * token * np.maximum(0, count - knee))
    price = Price(seconds, seconds, np.zeros(requests), rate, token)
    made = {
        "paths": paths, "offers": np.ones((drafters, depths)) if offers is None else offers,
        "passes": np.array(passes), "stands_in": np.array(passes),
        "first_s": np.full(drafters, first), "pass_s": np.where(passes, more, 0.0)[:, None],
        "token_s": np.where(passes, reads, 0.0), "price": price, "longest": depths,
        "budget": requests * depths, "need": nobody_behind(requests), "beams": chains_only(drafters, depths),
    }  # fmt: skip
    return Pool(**(made | changes))


@st.composite
def pools(draw, *, models, lookups, blocks=0, knee=False):
    """Up to two requests, with chains of each drafter."""
    requests, drafters = draw(st.integers(1, 2)), models + blocks + lookups
    hazard = st.sampled_from([0.05, 0.3, 0.6, 0.9])
    hazards = np.array(draw(st.lists(hazard, min_size=drafters * requests, max_size=drafters * requests)))
    paths = hazards.reshape(drafters, requests, 1) ** np.arange(1, DEPTHS + 1)
    offers = np.ones((drafters, DEPTHS))
    offers[models + blocks :] = draw(st.sampled_from([0.1, 0.5, 1.0]))
    return pool(
        paths, [True] * models + [False] * (blocks + lookups), offers=offers,
        stands_in=np.arange(drafters) < models + blocks, token=draw(st.sampled_from([0.02, 0.2, 0.5])),
        knee=draw(st.sampled_from([1, 2])) if knee else None, first=draw(st.sampled_from([0.02, 0.3])),
        more=draw(st.sampled_from([0.02, 0.3])), reads=draw(st.sampled_from([0.0, 0.1])),
    )  # fmt: skip


def every_choice(one: Pool):
    """The worth of every way to run, ask and verify: passes of each drafter, whom each request asks first and next, and
    how many of whose proposals are scored."""
    drafters, _, requests = one.paths.shape
    for passes in itertools.product(range(DEPTHS + 1), repeat=drafters):
        running = [d for d in range(drafters) if passes[d]]
        if any(not one.passes[d] and passes[d] not in (0, DEPTHS) for d in range(drafters)):
            continue
        orders: list[tuple[tuple[int, int], ...]] = [()]
        for d in running:
            for verified in range(1, passes[d] + 1):
                orders.append(((d, verified),))
                if not one.stands_in[d]:
                    orders += [
                        ((d, verified), (m, n)) for m in running if one.stands_in[m] for n in range(1, passes[m] + 1)
                    ]
        for plan in itertools.product(orders, repeat=requests):
            yield worth_of(one, passes, plan)


def worth_of(one: Pool, passes, plan) -> float:
    gain, tokens, none = 0.0, 0.0, 1.0
    for i, order in enumerate(plan):
        reach = 1.0
        for d, verified in order:
            gain += reach * float(one.offers[d, :verified] @ one.paths[d, :verified, i])
            tokens += reach * float(one.offers[d, :verified].sum())
            reach *= 1.0 - float(one.offers[d, 0])
        none *= reach
    drafts_s = sum(one.first_s[d] + (p - 1) * one.pass_s[d, 0] for d, p in enumerate(passes) if p)
    if one.asking_s.size:
        drafts_s += sum(passes[d] * one.asking_s[d, i] for i, order in enumerate(plan) for d, _ in order)
    reads_s = sum(one.token_s[d] for d, p in enumerate(passes) if p) * tokens
    seconds, price = one.price.varlen_s, one.price
    if tokens == 0.0:
        return float(-price.rate * (seconds[0] + drafts_s))
    held = max(1.0, tokens / (1 - none))
    target_s = none * seconds[0] + (1 - none) * np.interp(held, np.arange(len(seconds)), seconds)
    return float(gain - price.rate * (target_s + drafts_s + reads_s))


@given(pools(models=1, lookups=1))
@settings(max_examples=25, deadline=None)
def test_a_model_beside_a_lookup_is_used_as_well_as_it_can_be(one):
    """A token costs the same however many there are: no other choice is worth more."""
    best = max(every_choice(one))
    assert math.isclose(choose(one).value, best, rel_tol=1e-9, abs_tol=0.02), (choose(one), best)


def every_placeholder_choice(options: Pool):
    """Worth of every way to run a model (0) and a lookup (1), to order them, and to score a number of places of each
    request, where each place costs a token."""
    requests, hit = options.paths.shape[2], options.offers
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
        yield float(gain.sum() - options.price.rate * (options.price.varlen_s[0] + drafts_s))


@given(pools(models=1, lookups=1))
@settings(max_examples=50, deadline=None)
def test_placeholders_are_used_as_well_as_they_can_be(options):
    """A place costs a token whether the lookup finds anything or not, and the model shares it."""
    choice = choose(options._replace(scores_placeholders=True))
    assert choice.value == pytest.approx(max(every_placeholder_choice(options)), abs=1e-9)


def test_a_lookup_that_seldom_finds_anything_gets_no_placeholders():
    """Bug: in asynchronous scheduling every place is scored, and a lookup was charged for its hits alone: goodput fell
    to 0.94 of plain decoding's. A hit is worth 0.8 tokens and costs 0.2; one place in ten holds one."""
    paths, offers = np.array([[[0.8, 0.6, 0.4]] * 4]), np.array([[0.1] * 3])
    options = pool(paths, [False], offers=offers, token=0.2, first=0.01)
    assert choose(options).passes.any()
    assert not choose(options._replace(scores_placeholders=True)).passes.any()


@given(pools(models=2, lookups=0))
@settings(max_examples=25, deadline=None)
def test_two_models_are_used_as_well_as_they_can_be(one):
    assert choose(one).value >= max(every_choice(one)) - 0.02


@given(st.one_of(pools(models=0, blocks=1, lookups=1), pools(models=1, blocks=1, lookups=0)))
@settings(max_examples=50, deadline=None)
def test_block_drafter_is_used_as_well_as_it_can_be(options):
    """Bug: a block drafter ranked as a lookup, so it never stood in where a lookup found nothing."""
    assert choose(options).value >= max(every_choice(options)) - 0.02


def test_block_drafter_stands_in_behind_a_lookup():
    """Bug: it ran in place of the lookup or not at all, as a second lookup does."""
    paths, offers = np.array([[[0.9, 0.8, 0.7]] * 4, [[0.7, 0.5, 0.4]] * 4]), np.array([[0.3] * 3, [1.0] * 3])
    options = pool(paths, [False, False], offers=offers, stands_in=np.array([False, True]), token=0.01, first=0.01)
    for scheduling in (options, options._replace(scores_placeholders=True)):
        assert choose(scheduling).drafter_order.tolist() == [[0] * 4, [1] * 4]


def test_block_drafter_fills_a_uniform_step_in_part():
    """Uniform steps are cheap, and the block's last token is hardly ever accepted: two tokens of each request."""
    options = pool([[[0.9, 0.8, 0.0001]] * 4], [False], stands_in=np.array([True]), token=0.5, first=0.01)
    uniform_s = 1.0 + 0.05 * np.arange(13)
    uniform_s[9:] += 5.0
    choice = choose(options._replace(price=options.price._replace(uniform_s=uniform_s)))
    assert choice.passes.tolist() == [2]


@given(pools(models=1, lookups=0, knee=True))
@settings(max_examples=25, deadline=None)
def test_a_knee_in_reach_costs_less_than_a_token(one):
    """Prefixes are looked at for one price only, so at a knee the plan asks for too much or too little: that loses less
    than 0.7 tokens a step, and nothing is said to be worth more than it is. What is then scored is ranked exactly."""
    found, best = choose(one), max(every_choice(one))
    assert best - 0.7 < found.value <= best + 1e-9


@given(pools(models=1, lookups=1))
@settings(max_examples=25, deadline=None)
def test_k_0_is_always_there_and_wins_a_tie(one):
    """Where nothing is gained nobody is asked."""
    choice = choose(one)
    assert choice.value >= choice.plain_value
    if choice.gain == 0.0:
        assert not choice.passes.any()
        assert (choice.drafter_order == NOBODY).all()


@given(pools(models=3, lookups=0))
@settings(max_examples=25, deadline=None)
def test_three_models_lose_little_to_the_best_of_all_choices(options):
    """The search moves one drafter at a time."""
    assert choose(options).value >= max(every_choice(options)) - 0.05


def test_search_looks_at_few_plans_of_a_large_pool():
    """Bug: every set of drafters was weighed at every length, 2,550 plans for eight models, and one decision took
    15 ms at 512 requests."""
    models, longest = 8, 5
    pool_variants = variants(np.ones(models, bool), np.ones(models, bool), np.ones(models, np.int64))
    for weigh_uniform in (False, True):
        moves = one_drafter_moves(np.zeros(models, np.int64), False, pool_variants, longest, longest, weigh_uniform)
        assert len(moves.rows) == 1 + (1 + weigh_uniform) * longest * (models + 1)
        assert len(np.unique(np.column_stack([moves.rows, moves.uniform]), axis=0)) == len(moves.rows)


def test_each_request_asks_whoever_suits_it_best():
    """Two models with equal costs: one knows code, the other chat. Both run, each for its own."""
    paths = np.array([[[0.9, 0.8, 0.7]] * 4 + [[0.1, 0.0, 0.0]] * 4, [[0.1, 0.0, 0.0]] * 4 + [[0.9, 0.8, 0.7]] * 4])
    choice = choose(pool(paths, [True, True], token=0.01))
    assert choice.drafter_order[0].tolist() == [0] * 4 + [1] * 4
    assert (choice.passes == 3).all()


def test_a_second_model_that_adds_less_than_it_costs_does_not_run():
    paths = np.array([[[0.8, 0.6, 0.5]] * 2, [[0.82, 0.6, 0.5]] * 2])
    choice = choose(pool(paths, [True, True], token=0.01))
    assert (choice.passes > 0).sum() == 1


def test_where_a_lookup_finds_nothing_the_model_stands_in():
    """The model runs for the others anyway: both are entries in one ranking."""
    paths = np.array([[[0.6, 0.4, 0.2]] * 4, [[0.95, 0.9, 0.85]] * 4])
    offers = np.array([[1.0] * 3, [0.3] * 3])
    choice = choose(pool(paths, [True, False], offers=offers, token=0.01, first=0.02))
    assert choice.drafter_order.tolist() == [[1] * 4, [0] * 4]


def in_pieces(one: Pool) -> Pool:
    """Steps of unequal lengths take nine seconds, those of equal lengths what they took before."""
    seconds, price = one.price.varlen_s, one.price
    dear_s = np.where(np.arange(len(seconds)) > 0, 9.0, seconds)
    return one._replace(price=price._replace(varlen_s=dear_s, uniform_s=seconds))


def test_where_steps_of_equal_lengths_are_cheap_all_are_proposed_as_many():
    """With ragged steps alone nothing pays: they run in pieces, even ones as a graph."""
    cheap = in_pieces(pool(np.array([[[0.8, 0.6, 0.4]] * 4]), [True], token=0.05))
    dear = cheap.price._replace(uniform_s=cheap.price.varlen_s)
    assert not choose(cheap._replace(price=dear)).passes.any()
    choice = choose(cheap)
    assert choice.passes.tolist() == [3]
    assert choice.drafter_order[0].tolist() == [0] * 4


def test_a_request_that_no_token_pays_for_is_proposed_as_many_as_the_others_where_that_keeps_the_step_even():
    """Bug: one request in four that hardly accepts switched speculation off for all."""
    paths = np.array([[[0.8, 0.6, 0.4]] * 3 + [[0.04, 0.002, 0.0001]]])
    choice = choose(in_pieces(pool(paths, [True], token=0.05)))
    assert choice.passes.tolist() == [3]
    assert choice.drafter_order[0].tolist() == [0] * 4
    paths[0, 3] = 0.0  # the drafter cannot serve it
    assert not choose(in_pieces(pool(paths, [True], token=0.05))).passes.any()


def test_no_step_is_even_in_which_a_request_has_no_token_left_for_proposals():
    """It decodes beside the others, and nothing may be proposed for it."""
    cost, head = StepCost(constant_s=0.010), DrafterCost(StepCost(constant_s=1e-4))
    loop = controller((EAGLE,), profile(cost, {"eagle": head}, ragged_s=0.016))
    assert loop.plan_draft(batch(8)).passes[0] > 0
    assert loop.plan_draft(batch(8, left=[100] * 7 + [1])).passes[0] > 0, "it ends with this step"
    assert loop.plan_draft(batch(8, left=[100] * 7 + [2])).passes[0] == 0


def test_while_nothing_costs_everything_is_drafted():
    """Before the first step without a profile lambda is 0."""
    choice = choose(pool([[[0.8, 0.6, 0.4]] * 4], [True], rate=0.0))
    assert choice.value == pytest.approx(4 * 1.8)
    assert choice.passes.tolist() == [3]


def test_what_a_lookup_finds_is_of_unequal_lengths():
    """Bug: a lookup that always has one proposal, and seldom three, was priced as a step of equal lengths."""
    paths = np.array([[[0.8, 0.6, 0.4]] * 4])
    offers = np.array([[1.0, 0.4, 0.3]])
    assert not choose(in_pieces(pool(paths, [False], offers=offers, token=0.05))).passes.any()


@given(pools(models=2, lookups=1), st.floats(0.0, 2.0))
@settings(max_examples=25, deadline=None)
def test_steps_of_equal_lengths_are_weighed_with_all_others(one, dearer):
    """Against every length that all verify, each of the model that suits it best of those that run, where unequal
    lengths take `dearer` seconds more."""
    seconds, price = one.price.varlen_s, one.price
    dear_s = seconds + dearer * (np.arange(len(seconds)) > 0)
    one = one._replace(price=price._replace(varlen_s=dear_s, uniform_s=seconds))
    choice = choose(one)
    evenly = [even_worth(one, run, k) for run in ([0], [1], [0, 1]) for k in range(1, DEPTHS + 1)]
    assert choice.value >= max(evenly) - 1e-9
    assert choice.value >= choose(one._replace(price=one.price._replace(uniform_s=dear_s))).value - 1e-9


def even_worth(one: Pool, run: list[int], k: int) -> float:
    tokens, price = k * one.paths.shape[2], one.price
    drafts_s = sum(one.first_s[d] + (k - 1) * one.pass_s[d, 0] + one.token_s[d] * tokens for d in run)
    gain = one.paths[run, :k].sum(axis=1).max(axis=0).sum()
    return float(gain - price.rate * (price.uniform_s[tokens] + drafts_s))


def test_whoever_is_behind_its_tpot_comes_before_goodput():
    """Every token is too dear for goodput; the request that is behind gets as many as it needs."""
    paths = np.array([[[0.9, 0.8, 0.7]] * 2])
    dear = pool(paths, [True], token=0.5, rate=2.0)
    assert not choose(dear).passes.any()
    need = Need(np.array([True, False]), np.array([0.5, -9.0]), np.array([0.1, 0.1]))
    paths[0, 1] = 0.0  # nothing may be proposed to the other: no even step is possible
    choice = choose(pool(paths, [True], token=0.5, rate=2.0, need=need))
    assert choice.for_slo
    assert choice.drafter_order[0].tolist() == [0, NOBODY]


@given(
    st.one_of(pools(models=2, lookups=0), pools(models=1, lookups=1)),
    st.lists(st.sampled_from([0.0, 0.02, 0.2]), min_size=4, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_a_request_is_drafted_for_where_its_part_of_the_passes_pays(one, asking):
    """Of a drafter whose passes hold those alone that ask, each request has a price of its own."""
    asking_s = np.array(asking).reshape(2, 2)[:, : one.paths.shape[2]] * one.passes[:, None]
    one = one._replace(asking_s=asking_s)
    assert choose(one).value >= max(every_choice(one)) - 0.02


def test_a_model_that_is_dear_to_ask_is_not_asked_behind_a_lookup_that_seldom_misses():
    """Bug: its passes were weighed as if only a miss paid for them."""
    paths = np.array([[[0.7, 0.5, 0.4]] * 2, [[0.9, 0.8, 0.7]] * 2])
    offers = np.array([[1.0] * 3, [0.9] * 3])
    one = pool(paths, [True, False], offers=offers, token=0.01, first=0.01, more=0.01)
    assert choose(one).drafter_order.tolist() == [[1, 1], [0, 0]]
    choice = choose(one._replace(asking_s=np.array([[0.01, 0.3], [0.0, 0.0]])))
    assert choice.drafter_order.tolist() == [[1, 1], [0, NOBODY]]


def test_of_equal_lengths_each_asks_the_model_that_is_worth_most_at_its_price():
    """Bug: what asking costs counted only where lengths are unequal."""
    paths = np.array([[[0.8, 0.6, 0.4]] * 2, [[0.7, 0.5, 0.3]] * 2])
    one = in_pieces(pool(paths, [True, True], token=0.01, first=0.01, more=0.01))
    assert choose(one).drafter_order[0].tolist() == [0, 0]
    choice = choose(one._replace(asking_s=np.array([[0.3, 0.3], [0.01, 0.01]])))
    assert choice.drafter_order[0].tolist() == [1, 1]


def test_only_those_ask_whose_context_is_cheap_enough():
    paths = np.array([[[0.7, 0.5, 0.4]] * 4])
    asking_s = np.array([[0.05, 0.05, 0.9, 0.9]])
    choice = choose(pool(paths, [True], token=0.01, asking_s=asking_s))
    assert choice.drafter_order[0].tolist() == [0, 0, NOBODY, NOBODY]
