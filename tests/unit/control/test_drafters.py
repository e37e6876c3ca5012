"""Which drafters run, and which request uses which: compared with every possible choice."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.acceptance.trees import Beams, beams
from outrider_runtime.control.cost.model import DrafterCost, StepCost
from outrider_runtime.control.data.batch import NO_DRAFTER
from outrider_runtime.control.selection.candidates import one_drafter_moves, variants
from outrider_runtime.control.selection.drafters import choose
from outrider_runtime.control.selection.offers import Pool
from outrider_runtime.control.settings import Drafter
from outrider_runtime.control.slo import Need, none_behind
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
    """A pool whose step takes a second, and `token` seconds for each proposal, four times as much above `knee`. paths:
    (D, N, K). offers: (D, K)."""
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
        "budget": requests * depths, "need": none_behind(requests), "beams": chains_only(drafters, depths),
    }  # fmt: skip
    return Pool(**(made | changes))


@st.composite
def pools(draw, *, models, lookups, blocks=0, knee=False):
    """Up to two requests, with chains of each drafter."""
    requests, drafters = draw(st.integers(1, 2)), models + blocks + lookups
    rate = st.sampled_from([0.05, 0.3, 0.6, 0.9])
    rates = np.array(draw(st.lists(rate, min_size=drafters * requests, max_size=drafters * requests)))
    paths = rates.reshape(drafters, requests, 1) ** np.arange(1, DEPTHS + 1)
    offers = np.ones((drafters, DEPTHS))
    offers[models + blocks :] = draw(st.sampled_from([0.1, 0.5, 1.0]))
    return pool(
        paths, [True] * models + [False] * (blocks + lookups), offers=offers,
        stands_in=np.arange(drafters) < models + blocks, token=draw(st.sampled_from([0.02, 0.2, 0.5])),
        knee=draw(st.sampled_from([1, 2])) if knee else None, first=draw(st.sampled_from([0.02, 0.3])),
        more=draw(st.sampled_from([0.02, 0.3])), reads=draw(st.sampled_from([0.0, 0.1])),
    )  # fmt: skip


def every_choice(options: Pool):
    """Worth of every choice of passes, of the drafters that each request uses first and next, and of how many of their
    proposals are scored."""
    drafters, _, requests = options.paths.shape
    for passes in itertools.product(range(DEPTHS + 1), repeat=drafters):
        running = [d for d in range(drafters) if passes[d]]
        if any(not options.passes[d] and passes[d] not in (0, DEPTHS) for d in range(drafters)):
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


def worth_of(options: Pool, passes, plan) -> float:
    gain, tokens, none = 0.0, 0.0, 1.0
    for i, order in enumerate(plan):
        reach = 1.0
        for d, verified in order:
            gain += reach * float(options.offers[d, :verified] @ options.paths[d, :verified, i])
            tokens += reach * float(options.offers[d, :verified].sum())
            reach *= 1.0 - float(options.offers[d, 0])
        none *= reach
    drafts_s = sum(options.first_s[d] + (p - 1) * options.pass_s[d, 0] for d, p in enumerate(passes) if p)
    if options.asking_s.size:
        drafts_s += sum(passes[d] * options.asking_s[d, i] for i, order in enumerate(plan) for d, _ in order)
    reads_s = sum(options.token_s[d] for d, p in enumerate(passes) if p) * tokens
    seconds, price = options.price.varlen_s, options.price
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


def every_placeholder_choice(options: Pool):
    """Worth of every choice of passes of a model (0) and a lookup (1), of their order, and of the number of
    placeholders of each request, each of which costs a token."""
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
def test_placeholders_are_used_optimally(options):
    """A placeholder costs a token whether the lookup finds anything or not, and lookup and model share it."""
    choice = choose(options._replace(scores_placeholders=True))
    assert choice.value == pytest.approx(max(every_placeholder_choice(options)), abs=1e-9)


def test_lookup_with_a_low_hit_rate_gets_no_placeholders():
    """Bug: with asynchronous scheduling every placeholder is scored, but a lookup was charged for its hits alone:
    goodput / plain goodput fell to 0.94. Here a hit is worth 0.8 tokens and a placeholder costs 0.2; one in ten is a
    hit."""
    paths, offers = np.array([[[0.8, 0.6, 0.4]] * 4]), np.array([[0.1] * 3])
    options = pool(paths, [False], offers=offers, token=0.2, first=0.01)
    assert choose(options).passes.any()
    assert not choose(options._replace(scores_placeholders=True)).passes.any()


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
        assert not choice.passes.any()
        assert (choice.drafter_order == NO_DRAFTER).all()


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
    for weigh_uniform in (False, True):
        moves = one_drafter_moves(np.zeros(models, np.int64), False, pool_variants, longest, longest, weigh_uniform)
        assert len(moves.rows) == 1 + (1 + weigh_uniform) * longest * (models + 1)
        assert len(np.unique(np.column_stack([moves.rows, moves.uniform]), axis=0)) == len(moves.rows)


def test_request_uses_the_model_that_suits_it_best():
    """Two models of equal cost: one knows code, the other chat. Both run, each for its own requests."""
    paths = np.array([[[0.9, 0.8, 0.7]] * 4 + [[0.1, 0.0, 0.0]] * 4, [[0.1, 0.0, 0.0]] * 4 + [[0.9, 0.8, 0.7]] * 4])
    choice = choose(pool(paths, [True, True], token=0.01))
    assert choice.drafter_order[0].tolist() == [0] * 4 + [1] * 4
    assert (choice.passes == 3).all()


def test_second_model_that_does_not_pay_does_not_run():
    paths = np.array([[[0.8, 0.6, 0.5]] * 2, [[0.82, 0.6, 0.5]] * 2])
    choice = choose(pool(paths, [True, True], token=0.01))
    assert (choice.passes > 0).sum() == 1


def test_model_serves_requests_that_a_lookup_misses():
    """The model runs for other requests anyway, so a request has the lookup first and the model second."""
    paths = np.array([[[0.6, 0.4, 0.2]] * 4, [[0.95, 0.9, 0.85]] * 4])
    offers = np.array([[1.0] * 3, [0.3] * 3])
    choice = choose(pool(paths, [True, False], offers=offers, token=0.01, first=0.02))
    assert choice.drafter_order.tolist() == [[1] * 4, [0] * 4]


def with_expensive_varlen_steps(options: Pool) -> Pool:
    """The pool with varlen steps of nine seconds; uniform steps take what they took before."""
    seconds, price = options.price.varlen_s, options.price
    varlen_s = np.where(np.arange(len(seconds)) > 0, 9.0, seconds)
    return options._replace(price=price._replace(varlen_s=varlen_s, uniform_s=seconds))


def test_cheap_uniform_steps_give_all_requests_one_length():
    """Uniform steps run as one graph and are cheap. If all steps cost what varlen ones do, nothing pays."""
    cheap = with_expensive_varlen_steps(pool(np.array([[[0.8, 0.6, 0.4]] * 4]), [True], token=0.05))
    expensive = cheap.price._replace(uniform_s=cheap.price.varlen_s)
    assert not choose(cheap._replace(price=expensive)).passes.any()
    choice = choose(cheap)
    assert choice.passes.tolist() == [3]
    assert choice.drafter_order[0].tolist() == [0] * 4


def test_request_that_hardly_accepts_keeps_the_step_uniform():
    """Bug: one request in four that hardly accepts switched speculation off for all."""
    paths = np.array([[[0.8, 0.6, 0.4]] * 3 + [[0.04, 0.002, 0.0001]]])
    choice = choose(with_expensive_varlen_steps(pool(paths, [True], token=0.05)))
    assert choice.passes.tolist() == [3]
    assert choice.drafter_order[0].tolist() == [0] * 4
    paths[0, 3] = 0.0  # the drafter cannot serve it
    assert not choose(with_expensive_varlen_steps(pool(paths, [True], token=0.05))).passes.any()


def test_request_without_tokens_left_prevents_a_uniform_step():
    """It decodes together with the others, and nothing may be proposed for it."""
    cost, head = StepCost(constant_s=0.010), DrafterCost(StepCost(constant_s=1e-4))
    loop = controller((EAGLE,), profile(cost, {"eagle": head}, varlen_s=0.016))
    assert loop.plan_draft(batch(8)).passes[0] > 0
    assert loop.plan_draft(batch(8, left=[100] * 7 + [1])).passes[0] > 0, "it ends with this step"
    assert loop.plan_draft(batch(8, left=[100] * 7 + [2])).passes[0] == 0


def test_lambda_of_0_drafts_everything():
    """Lambda is 0 before the first step if there is no profile."""
    choice = choose(pool([[[0.8, 0.6, 0.4]] * 4], [True], rate=0.0))
    assert choice.value == pytest.approx(4 * 1.8)
    assert choice.passes.tolist() == [3]


def test_lookup_is_priced_as_a_varlen_step():
    """Bug: a lookup that always has one proposal, but seldom three, was priced as a uniform step."""
    paths = np.array([[[0.8, 0.6, 0.4]] * 4])
    offers = np.array([[1.0, 0.4, 0.3]])
    assert not choose(with_expensive_varlen_steps(pool(paths, [False], offers=offers, token=0.05))).passes.any()


@given(pools(models=2, lookups=1), st.floats(0.0, 2.0))
@settings(max_examples=25, deadline=None)
def test_uniform_plans_are_compared_with_varlen_plans(options, extra_s):
    """The choice is worth at least as much as every uniform plan (all requests verify k tokens, each of the model that
    suits it best), if varlen steps take `extra_s` seconds more."""
    seconds, price = options.price.varlen_s, options.price
    varlen_s = seconds + extra_s * (np.arange(len(seconds)) > 0)
    options = options._replace(price=price._replace(varlen_s=varlen_s, uniform_s=seconds))
    choice = choose(options)
    uniform = [even_worth(options, run, k) for run in ([0], [1], [0, 1]) for k in range(1, DEPTHS + 1)]
    assert choice.value >= max(uniform) - 1e-9
    assert choice.value >= choose(options._replace(price=options.price._replace(uniform_s=varlen_s))).value - 1e-9


def even_worth(options: Pool, run: list[int], k: int) -> float:
    tokens, price = k * options.paths.shape[2], options.price
    drafts_s = sum(options.first_s[d] + (k - 1) * options.pass_s[d, 0] + options.token_s[d] * tokens for d in run)
    gain = options.paths[run, :k].sum(axis=1).max(axis=0).sum()
    return float(gain - price.rate * (price.uniform_s[tokens] + drafts_s))


def test_late_request_comes_before_goodput():
    """No token pays for goodput; the late request still gets as many as it needs."""
    paths = np.array([[[0.9, 0.8, 0.7]] * 2])
    assert not choose(pool(paths, [True], token=0.5, rate=2.0)).passes.any()
    need = Need(np.array([True, False]), np.array([0.5, -9.0]), np.array([0.1, 0.1]))
    paths[0, 1] = 0.0  # nothing may be proposed for the other request, so no uniform step is possible
    choice = choose(pool(paths, [True], token=0.5, rate=2.0, need=need))
    assert choice.for_slo
    assert choice.drafter_order[0].tolist() == [0, NO_DRAFTER]


@given(
    st.one_of(pools(models=2, lookups=0), pools(models=1, lookups=1)),
    st.lists(st.sampled_from([0.0, 0.02, 0.2]), min_size=4, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_request_with_its_own_price_is_drafted_for_if_it_pays(options, asking):
    """If a drafter's passes hold only the requests that use it, each request has its own price."""
    asking_s = np.array(asking).reshape(2, 2)[:, : options.paths.shape[2]] * options.passes[:, None]
    options = options._replace(asking_s=asking_s)
    assert choose(options).value >= max(every_choice(options)) - 0.02


def test_expensive_model_is_not_used_behind_a_reliable_lookup():
    """Bug: the model's passes were priced as if they ran only for misses of the lookup."""
    paths = np.array([[[0.7, 0.5, 0.4]] * 2, [[0.9, 0.8, 0.7]] * 2])
    offers = np.array([[1.0] * 3, [0.9] * 3])
    options = pool(paths, [True, False], offers=offers, token=0.01, first=0.01, more=0.01)
    assert choose(options).drafter_order.tolist() == [[1, 1], [0, 0]]
    choice = choose(options._replace(asking_s=np.array([[0.01, 0.3], [0.0, 0.0]])))
    assert choice.drafter_order.tolist() == [[1, 1], [0, NO_DRAFTER]]


def test_uniform_step_counts_the_price_of_using_a_model():
    """Bug: the price of using a model counted only in varlen steps."""
    paths = np.array([[[0.8, 0.6, 0.4]] * 2, [[0.7, 0.5, 0.3]] * 2])
    options = with_expensive_varlen_steps(pool(paths, [True, True], token=0.01, first=0.01, more=0.01))
    assert choose(options).drafter_order[0].tolist() == [0, 0]
    choice = choose(options._replace(asking_s=np.array([[0.3, 0.3], [0.01, 0.01]])))
    assert choice.drafter_order[0].tolist() == [1, 1]


def test_requests_with_expensive_contexts_use_no_drafter():
    paths = np.array([[[0.7, 0.5, 0.4]] * 4])
    asking_s = np.array([[0.05, 0.05, 0.9, 0.9]])
    choice = choose(pool(paths, [True], token=0.01, asking_s=asking_s))
    assert choice.drafter_order[0].tolist() == [0, 0, NO_DRAFTER, NO_DRAFTER]
