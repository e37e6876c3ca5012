"""The replay of trees: what a recorded beam proposes, what is selected of it, and how far the target goes along."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import Batch
from outrider_runtime.control.plans import ROOT, Forest, Purpose
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate import recording as recordings
from outrider_runtime.simulate.recording import DEPTH, OFF_PATH, WIDTH
from outrider_runtime.simulate.replay.beams import RecordedBeams
from outrider_runtime.simulate.replay.engine import ReplayEngine, Setting
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.replay.workload import Lengths, draw_closed_load
from outrider_runtime.simulate.worlds import world as worlds

from bench.replay.tree_baselines import AdaServe, StaticTree, path_probabilities

RECORDED = recordings.load_shipped()
LIFTED = recordings.lift(RECORDED, 0.7, seed=0)
BEAMS = RecordedBeams(RECORDED.trees["eagle"])
EAGLE = Drafter("eagle", passes=True, needs_hidden=True, widest=WIDTH)
WORLD = worlds.load("llama-3.1-8b-a100")


def forest_of(table, requests: int) -> Forest:
    request, parent, depth, rank, sure = table.nodes
    drafter_order = np.zeros((1, requests), np.int64)
    return Forest(
        request, parent, np.zeros_like(request), depth, rank, sure, drafter_order, np.array([DEPTH]), Purpose.CHOICE
    )  # fmt: skip


def running(requests: int, **columns) -> Batch:
    zeros, many = np.zeros(requests, np.int64), np.full(requests, 1000)
    values: dict[str, Any] = {
        "slot": np.arange(requests), "slo_class": zeros, "context": many, "prompt": zeros, "prompt_left": zeros,
        "left": many, "emitted": np.full(requests, 10), "elapsed_s": np.full(requests, 0.1), "missing": zeros[None],
        "now_s": 0.0, "token_budget": 8192, "free_kv_tokens": 10**6,
    }  # fmt: skip
    return Batch(**(values | columns))


@given(st.integers(0, 10**6), st.integers(1, WIDTH), st.integers(1, DEPTH))
@settings(max_examples=60, deadline=None)
def test_narrow_beam_keeps_its_width_and_the_greedy_chain(seed, width, depth):
    at = np.random.default_rng(seed).integers(0, RECORDED.start[-1], 5)
    table = BEAMS.table(at, np.full(5, depth), width)
    forest = forest_of(table, 5)
    assert (table.there.sum(2) <= width).all()
    assert forest.depth.max() == depth
    assert (forest.parent < np.arange(len(forest))).all()
    below = forest.parent != ROOT
    assert (forest.depth[below] == forest.depth[forest.parent[below]] + 1).all()
    assert (forest.request[below] == forest.request[forest.parent[below]]).all()
    spine = forest.rank == 0
    for node in np.flatnonzero(below):
        spine[node] &= spine[forest.parent[node]]
    assert (np.bincount(forest.request[spine], minlength=5) == depth).all()


@pytest.mark.parametrize("made", [RECORDED, LIFTED])
def test_beam_accepts_at_least_as_much_as_its_chain(made):
    """One target: where the chain's first d tokens are right, the way through the beam is that chain."""
    beams, column = RecordedBeams(made.trees["eagle"]), made.drafters.index("eagle")
    positions = np.arange(made.start[-1])
    table = beams.table(positions, np.full(len(positions), DEPTH), WIDTH)
    way = (table.right & table.there).any(2).cumprod(1).sum(1)
    assert (way >= made.depth[column]).all()


def test_lifting_moves_only_the_true_token_to_rank_1():
    """Beam and confidences stay; a later child is right as often where the first one is not."""
    before, after = RECORDED.trees["eagle"], LIFTED.trees["eagle"]
    assert (before.parent == after.parent).all()
    assert (before.confidence == after.confidence).all()
    assert (after.on_path[:, 0] == 0).mean() == pytest.approx(0.7, abs=0.02)
    later = [
        [(trees.on_path[:, 0] == place).sum() / (trees.on_path[:, 0] != 0).sum() for place in range(1, WIDTH)]
        for trees in (before, after)
    ]
    assert later[1] == pytest.approx(later[0], abs=0.05)
    gone = after.on_path == OFF_PATH
    assert (gone[:, 1:] | ~gone[:, :-1]).all()  # a node that has left the beam never comes back


def test_trees_serve_each_token_once_in_fewer_steps_than_chains():
    """A chain and a tree around it give the same tokens for the same requests; a step with the tree gives more."""
    steps = {}
    for name, policy in (("chain", Fixed((EAGLE,), 0, 8)), ("tree", StaticTree(1, 0, WIDTH, (4, 1, 1, 1, 1, 1, 1, 1)))):
        load = draw_closed_load(4, 16, LIFTED, None, np.random.default_rng(0), Lengths(200, 64))
        engine = ReplayEngine(Setting(WORLD, LIFTED, (EAGLE,), Limits(), bundled=True), load, policy)
        engine.run()
        assert sum(engine.log.tokens) == load.output.sum()
        steps[name] = len(engine.log.output_at_s)
    assert steps["tree"] < steps["chain"]


def test_specinfer_tree_has_children_at_all_depths_no_orphans():
    forest = forest_of(BEAMS.table(np.arange(20), np.full(20, DEPTH), WIDTH), 20)
    nodes = StaticTree(1, 0, WIDTH).plan_verify(running(20), forest).nodes
    below = nodes & (forest.parent != ROOT)
    assert nodes[forest.parent[below]].all()
    by_depth = [np.bincount(forest.request[nodes & (forest.depth == d)], minlength=20) for d in (1, 2, 3)]
    assert (by_depth[0] == 1).all()
    assert (by_depth[1] == 1).all()
    assert by_depth[2].max() == 3
    assert forest.depth[nodes].max() == DEPTH


def adaserve(budget: int, *, emitted: list[int]):
    """Two requests, a TPOT of 10 ms, and 100 ms since their first tokens."""
    forest = forest_of(BEAMS.table(np.array([5, 9]), np.full(2, DEPTH), WIDTH), 2)
    policy = AdaServe(1, 0, budget, DEPTH, WIDTH, (0.01,))
    return forest, policy.plan_verify(running(2, emitted=np.array(emitted)), forest)


def test_adaserve_spends_its_budget_to_the_token_roots_included():
    forest, plan = adaserve(20, emitted=[10, 10])
    assert plan.lengths.sum() == 20 - 2
    paths = path_probabilities(forest)
    assert paths[plan.nodes].min() >= paths[~plan.nodes].max()
    assert adaserve(2, emitted=[10, 10])[1].lengths.sum() == 0
    assert adaserve(1000, emitted=[10, 10])[1].nodes.all()


def test_adaserve_serves_late_requests_before_throughput():
    """The second request has had 5 tokens where 10 were due: with little budget its nodes are taken."""
    _, plan = adaserve(8, emitted=[30, 5])
    assert plan.lengths.tolist() == [0, 6]


def test_adaserve_depth_and_width_follow_equations_8_and_9():
    policy = AdaServe(1, 0, 64, DEPTH, WIDTH, (0.01,))
    assert [policy.size(n) for n in (1, 10, 24, 40, 100)] == [(8, 4), (7, 4), (3, 2), (2, 1), (1, 1)]
