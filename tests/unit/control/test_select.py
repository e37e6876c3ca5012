"""What the target scores: the best of all plans, for chains and trees, against every plan there is."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.data.forest import ROOT
from outrider_runtime.control.selection.nodes import Selection, select
from outrider_runtime.control.slo import MOST_FORCED, forced_nodes
from outrider_runtime.control.value import Price

REQUESTS, NODES = 3, 10


def price(seconds, rate=1.0, node_s=None, uniform=None) -> Price:
    ragged = np.array(seconds, dtype=float)
    even = ragged if uniform is None else np.array(uniform, dtype=float)
    node_s = np.zeros(REQUESTS) if node_s is None else np.array(node_s, dtype=float)
    return Price(ragged, even, node_s, rate, 0.0)


def selected(paths, request, depth, cost: Price, budget, forced=None, longest_s=math.inf) -> Selection:
    """Where nothing else is said, none is forced and the pass may be as long as it likes."""
    forced = np.zeros(len(paths), dtype=bool) if forced is None else forced
    return select(paths, request, depth, cost, budget, forced, longest_s)


@st.composite
def forests(draw):
    """(paths, request, depth, parent) of up to three requests and ten nodes, trees included; some equally likely."""
    count = draw(st.integers(0, NODES))
    request: list[int] = []
    parent: list[int] = []
    depth: list[int] = []
    paths: list[float] = []
    for node in range(count):
        above = draw(st.integers(ROOT, node - 1))
        parent.append(above)
        request.append(draw(st.integers(0, REQUESTS - 1)) if above == ROOT else request[above])
        depth.append(1 if above == ROOT else depth[above] + 1)
        hazard = draw(st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 0.99]))
        paths.append(hazard * (1.0 if above == ROOT else paths[above]))
    as_ints = (np.array(values, dtype=np.int64) for values in (request, depth, parent))
    return (np.array(paths, dtype=float), *as_ints)


@st.composite
def seconds(draw):
    """A step's seconds by proposals: it never gets shorter; bends, and a jump from plain decoding, anywhere."""
    steps = draw(st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]), min_size=NODES, max_size=NODES))
    return 1.0 + np.concatenate([[0.0], np.cumsum(steps)])


def plans(request, parent):
    """Every set of nodes that holds the parent of each of its nodes."""
    for chosen in itertools.product([False, True], repeat=len(request)):
        if all(parent[m] == ROOT or chosen[parent[m]] for m in range(len(request)) if chosen[m]):
            yield np.array(chosen, dtype=bool)


def worth_of(nodes, paths, request, cost: Price) -> float:
    gained = float((paths - cost.rate * cost.node_s[request])[nodes].sum())
    return gained - cost.rate * float(cost.varlen_s[nodes.sum()])


@given(forests(), seconds(), st.sampled_from([0.2, 1.0, 3.0]), st.integers(0, NODES))
@settings(max_examples=150, deadline=None)
def test_the_plan_is_the_best_of_all_plans_within_the_budget(forest, ragged, rate, budget):
    """Trees and chains, under any rising cost with bends: the ranking's best prefix loses to no plan."""
    paths, request, depth, parent = forest
    cost = price(ragged, rate, node_s=[0.0, 0.1, 0.3])
    best = max(worth_of(p, paths, request, cost) for p in plans(request, parent) if p.sum() <= budget)
    found = selected(paths, request, depth, cost, budget)
    assert found.nodes.sum() <= budget
    assert all(parent[m] == ROOT or found.nodes[parent[m]] for m in np.flatnonzero(found.nodes))
    assert math.isclose(found.value, worth_of(found.nodes, paths, request, cost), abs_tol=1e-9)
    assert found.value >= worth_of(np.zeros(len(paths), bool), paths, request, cost) - 1e-12
    assert math.isclose(found.value, best, abs_tol=1e-9)


@given(forests(), seconds())
@settings(max_examples=100, deadline=None)
def test_what_an_slo_forces_is_scored_and_the_rest_is_the_best_beside_it(forest, ragged):
    """The first node of each tree is forced: no plan with these nodes is worth more."""
    paths, request, depth, parent = forest
    forced = parent == ROOT
    cost = price(ragged)
    found = selected(paths, request, depth, cost, NODES, forced=forced)
    assert found.nodes[forced].all()
    best = max(worth_of(p, paths, request, cost) for p in plans(request, parent) if p[forced].all())
    assert math.isclose(found.value, best, abs_tol=1e-9)


def lexicographic(nodes, paths, request, needed, order, cost):
    """What each request gets of what it needs, in their order, and then what all is worth."""
    got = []
    for i in order:
        best = np.sort(paths[nodes & (request == i)])[::-1][:MOST_FORCED]
        got.append(round(min(1.0 + float(best.sum()), float(needed[i])), 9))
    return (*got, round(worth_of(nodes, paths, request, cost), 9))


@given(
    forests(), seconds(), st.lists(st.sampled_from([0.5, 1.2, 1.6, 2.3, 3.4]), min_size=REQUESTS, max_size=REQUESTS),
    st.lists(st.booleans(), min_size=REQUESTS, max_size=REQUESTS), st.integers(0, NODES),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_slo_first_is_the_best_of_all_plans_request_by_request_and_then_for_goodput(
    forest, ragged, needs, late, budget
):
    """AdaServe's two selections against every set of connected subtrees: the slowest savable request first gets as much
    of what it needs as n_max nodes give, then the next one, and what is left goes where it is worth most."""
    paths, request, depth, parent = forest
    who, needed, cost = np.array(late), np.array(needs), price(ragged)
    order = sorted(np.flatnonzero(who), key=lambda i: (-needed[i], i))
    forced = forced_nodes(paths, request, who, needed, 1.0, cost, budget)
    found = selected(paths, request, depth, cost, budget, forced=forced)
    within = [plan for plan in plans(request, parent) if plan.sum() <= budget]
    keys = [lexicographic(plan, paths, request, needed, order, cost) for plan in within]
    assert found.nodes.sum() <= budget
    assert all(parent[m] == ROOT or found.nodes[parent[m]] for m in np.flatnonzero(found.nodes))
    np.testing.assert_allclose(lexicographic(found.nodes, paths, request, needed, order, cost), max(keys), atol=2e-9)


@given(forests(), seconds(), st.sampled_from([1.2, 1.6, 2.5]))
@settings(max_examples=100, deadline=None)
def test_nothing_beyond_the_forced_makes_a_step_longer_than_it_may_be(forest, ragged, longest_s):
    """Requests that are just in time stay so."""
    paths, request, depth, parent = forest
    forced = (parent == ROOT) & (request == 0)
    found = selected(paths, request, depth, price(ragged), NODES, forced=forced, longest_s=longest_s)
    allowed = max(longest_s, float(ragged[forced.sum()]))
    assert ragged[found.nodes.sum()] <= allowed + 1e-12


def test_equal_lengths_win_where_they_run_in_a_cheaper_graph():
    """Three requests with chains of two: the even step costs half of what a ragged one does."""
    request, depth = np.repeat(np.arange(3), 2), np.tile([1, 2], 3)
    paths = np.array([0.9, 0.8, 0.5, 0.3, 0.9, 0.8])
    ragged = 1.0 + 0.4 * np.arange(7)
    found = selected(paths, request, depth, price(ragged, uniform=1.0 + 0.2 * np.arange(7)), 6)
    assert found.nodes.all()
    alone = selected(paths, request, depth, price(ragged), 6)
    assert alone.nodes.tolist() == [True, True, True, False, True, True]


def test_an_even_step_that_holds_the_forced_is_no_longer_than_they_are_alone():
    """One of three requests is forced to a token: three tokens would take as long as the step may not."""
    request, depth = np.arange(3), np.ones(3, np.int64)
    cost = price([1.0, 1.0, 1.2, 1.25])
    found = selected(np.full(3, 0.5), request, depth, cost, 3, forced=request == 0, longest_s=1.2)
    assert found.nodes.sum() == 2
    assert selected(np.full(3, 0.5), request, depth, cost, 3, forced=request < 3, longest_s=1.2).nodes.all()


def test_a_tree_is_no_even_step():
    """One request has two siblings and another nothing: as many nodes as requests, and no graph for it."""
    request, depth = np.array([0, 0, 1]), np.array([1, 1, 1])
    paths = np.array([0.5, 0.4, 0.6])
    found = selected(paths, request, depth, price(np.full(7, 1.0), uniform=np.full(7, 0.1)), 6)
    assert math.isclose(found.value, 1.5 - 1.0)


def test_equal_lengths_are_no_even_step_where_a_request_has_no_tokens_left_for_them():
    """Its nodes are worth nothing and are never verified: the others' lengths make a ragged step."""
    request, depth = np.arange(3), np.ones(3, np.int64)
    ragged = np.array([1.0, 3.0, 3.0, 3.0])
    cost = price(ragged, uniform=[1.0, 1.0, 1.0, 1.0])
    assert selected(np.array([0.9, 0.9, 0.9]), request, depth, cost, 3).nodes.all()
    assert not selected(np.array([0.9, 0.9, 0.0]), request, depth, cost, 3).nodes.any()
