"""The nodes that the target scores, compared with every possible plan, for chains and trees."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.plans import ROOT
from outrider_runtime.control.slo import MOST_FORCED, forced_nodes
from outrider_runtime.control.value import Price
from outrider_runtime.control.verify import Selection, select

REQUESTS, NODES = 3, 10


def price(seconds, rate=1.0, node_s=None) -> Price:
    node_s = np.zeros(REQUESTS) if node_s is None else np.array(node_s, dtype=float)
    return Price(np.array(seconds, dtype=float), node_s, rate, 0.0)


def selected(paths, request, cost: Price, budget, forced=None, longest_s=math.inf) -> Selection:
    """The selection; by default no node is forced, and the pass may take any time."""
    forced = np.zeros(len(paths), dtype=bool) if forced is None else forced
    return select(paths, request, cost, budget, forced, longest_s)


@st.composite
def forests(draw):
    """(paths, request, parent) of up to three requests and ten nodes, trees included; some are equally
    likely."""
    count = draw(st.integers(0, NODES))
    request: list[int] = []
    parent: list[int] = []
    paths: list[float] = []
    for node in range(count):
        above = draw(st.integers(ROOT, node - 1))
        parent.append(above)
        request.append(draw(st.integers(0, REQUESTS - 1)) if above == ROOT else request[above])
        rate = draw(st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 0.99]))
        paths.append(rate * (1.0 if above == ROOT else paths[above]))
    as_ints = (np.array(values, dtype=np.int64) for values in (request, parent))
    return (np.array(paths, dtype=float), *as_ints)


@st.composite
def seconds(draw):
    """Seconds of a step by the number of proposals: never falling, with knees and jumps anywhere."""
    steps = draw(st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]), min_size=NODES, max_size=NODES))
    return 1.0 + np.concatenate([[0.0], np.cumsum(steps)])


def plans(request, parent):
    """Every set of nodes that holds the parent of each of its nodes."""
    for chosen in itertools.product([False, True], repeat=len(request)):
        if all(parent[m] == ROOT or chosen[parent[m]] for m in range(len(request)) if chosen[m]):
            yield np.array(chosen, dtype=bool)


def worth_of(nodes, paths, request, cost: Price) -> float:
    gained = float((paths - cost.rate * cost.node_s[request])[nodes].sum())
    return gained - cost.rate * float(cost.target_s[nodes.sum()])


@given(forests(), seconds(), st.sampled_from([0.2, 1.0, 3.0]), st.integers(0, NODES))
@settings(max_examples=150, deadline=None)
def test_selection_is_the_best_plan_within_the_budget(forest, varlen_s, rate, budget):
    """Trees and chains, any rising cost with knees: no plan is worth more than the ranking's best prefix."""
    paths, request, parent = forest
    cost = price(varlen_s, rate, node_s=[0.0, 0.1, 0.3])
    best = max(worth_of(p, paths, request, cost) for p in plans(request, parent) if p.sum() <= budget)
    selection = selected(paths, request, cost, budget)
    assert selection.nodes.sum() <= budget
    assert all(parent[m] == ROOT or selection.nodes[parent[m]] for m in np.flatnonzero(selection.nodes))
    assert math.isclose(selection.value, worth_of(selection.nodes, paths, request, cost), abs_tol=1e-9)
    assert selection.value >= worth_of(np.zeros(len(paths), bool), paths, request, cost) - 1e-12
    assert math.isclose(selection.value, best, abs_tol=1e-9)


@given(forests(), seconds())
@settings(max_examples=100, deadline=None)
def test_selection_with_forced_nodes_is_the_best_such_plan(forest, varlen_s):
    """The first node of each tree is forced: no plan with these nodes is worth more."""
    paths, request, parent = forest
    forced = parent == ROOT
    cost = price(varlen_s)
    selection = selected(paths, request, cost, NODES, forced=forced)
    assert selection.nodes[forced].all()
    best = max(worth_of(p, paths, request, cost) for p in plans(request, parent) if p[forced].all())
    assert math.isclose(selection.value, best, abs_tol=1e-9)


def lexicographic(nodes, paths, request, needed, order, cost):
    """Expected tokens of each late request, up to what it needs, in order; then the plan's worth."""
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
def test_late_requests_come_first_and_the_rest_is_the_best(forest, varlen_s, needs, is_late, budget):
    """AdaServe's two selections, compared with every set of connected subtrees: the late request with the largest need
    gets as much of it as n_max nodes give, then the next one; the rest of the budget goes where it is worth most."""
    paths, request, parent = forest
    late, needed, cost = np.array(is_late), np.array(needs), price(varlen_s)
    order = sorted(np.flatnonzero(late), key=lambda i: (-needed[i], i))
    forced = forced_nodes(paths, request, late, needed, 1.0, cost, budget)
    selection = selected(paths, request, cost, budget, forced=forced)
    within = [plan for plan in plans(request, parent) if plan.sum() <= budget]
    keys = [lexicographic(plan, paths, request, needed, order, cost) for plan in within]
    assert selection.nodes.sum() <= budget
    assert all(parent[m] == ROOT or selection.nodes[parent[m]] for m in np.flatnonzero(selection.nodes))
    np.testing.assert_allclose(
        lexicographic(selection.nodes, paths, request, needed, order, cost), max(keys), atol=2e-9
    )


@given(forests(), seconds(), st.sampled_from([1.2, 1.6, 2.5]))
@settings(max_examples=100, deadline=None)
def test_selection_keeps_the_longest_step_unless_forced(forest, varlen_s, longest_s):
    """Requests that are just in time are not made late."""
    paths, request, parent = forest
    forced = (parent == ROOT) & (request == 0)
    selection = selected(paths, request, price(varlen_s), NODES, forced=forced, longest_s=longest_s)
    allowed = max(longest_s, float(varlen_s[forced.sum()]))
    assert varlen_s[selection.nodes.sum()] <= allowed + 1e-12


def test_step_with_forced_nodes_keeps_the_longest_step():
    """One of three requests has a forced token: a step of three tokens would exceed the longest step."""
    request = np.arange(3)
    cost = price([1.0, 1.0, 1.2, 1.25])
    selection = selected(np.full(3, 0.5), request, cost, 3, forced=request == 0, longest_s=1.2)
    assert selection.nodes.sum() == 2
    assert selected(np.full(3, 0.5), request, cost, 3, forced=request < 3, longest_s=1.2).nodes.all()
