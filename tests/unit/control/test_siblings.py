"""Trees: acceptance rates of a node's later children, and the depth and width of proposed trees."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.control.draft_options import DraftOptions
from outrider_runtime.control.plans import ROOT, Forest, Purpose, trials
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.slo import none_behind
from outrider_runtime.control.trees import Beams
from outrider_runtime.control.value import Price

from tests.unit.control.columns import batch, choose

DEPTH, WIDTH = 3, 4
BEAM = Drafter("eagle", passes=True, needs_hidden=True, widest=WIDTH)


def acceptance(slots: int = 8) -> Acceptance:
    return Acceptance(Settings((BEAM,), DEPTH, slots))


def forest(request: Any, parent: Any, confidence: Any, requests: int) -> Forest:
    """A forest of one drafter; depths and ranks follow from the parents."""
    depth, rank, seen = list[int](), list[int](), dict[tuple[int, int], int]()
    for node, above in enumerate(parent):
        depth.append(1 if above == ROOT else depth[above] + 1)
        key = (request[node], above)
        rank.append(seen.get(key, 0))
        seen[key] = rank[-1] + 1
    return Forest(
        np.array(request), np.array(parent), np.zeros(len(parent), np.int64), np.array(depth), np.array(rank),
        np.array(confidence, float), np.zeros((1, requests), np.int64), np.array([DEPTH]), Purpose.CHOICE,
    )  # fmt: skip


@st.composite
def grown(draw: Any) -> Forest:
    """Trees of up to three requests, siblings in any order of confidence."""
    count = draw(st.integers(1, 12))
    request: list[int] = []
    parent: list[int] = []
    depth: list[int] = []
    for node in range(count):
        above = draw(st.integers(ROOT, node - 1).filter(lambda at: at == ROOT or depth[at] < DEPTH))
        parent.append(above)
        depth.append(1 if above == ROOT else depth[above] + 1)
        request.append(draw(st.integers(0, 2)) if above == ROOT else request[above])
    odds = draw(st.lists(st.floats(-9, 9), min_size=count, max_size=count))
    return forest(request, parent, odds, 3)


@given(grown(), st.integers(0, 2**32 - 1), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_children_sum_to_at_most_their_parent(made, seed, steps):
    """This holds after any observations. So parents win ties, and any prefix of a ranking is a set of trees."""
    known, rng, running = acceptance(), np.random.default_rng(seed), batch(3)
    for _ in range(steps):
        accepted = np.zeros(len(made), bool)
        for node, above in enumerate(made.parent):
            free = not accepted[(made.parent == above) & (made.request == made.request[node])].any()
            accepted[node] = free and (above == ROOT or accepted[above]) and rng.random() < 0.4
        everything = np.ones(len(made), bool)
        known.observe(running, made, everything, accepted, trials(made, everything, accepted))
    paths = known.node_paths(running, made)
    for node, up in enumerate(made.parent):
        whole = 1.0 if up == ROOT else paths[up]
        assert 0.0 <= paths[node] <= whole
        same = (made.parent == up) & (made.request == made.request[node])
        assert paths[same].sum() <= whole + 1e-12


def serve(known: Acceptance, steps: int, seed: int, *, first: float = 0.5, later: float = 0.6):
    """Serve beams of 4 children of each request's root, and 2 of its first child. The drafter's own probability is too
    low for the first child and too high for the others. Returns (rank, own probability, path probability, accepted,
    true rate) of each node at the root."""
    rng, rows, running = np.random.default_rng(seed), [], batch(4)
    request = np.repeat(np.arange(4), 6)
    parent = np.concatenate([[ROOT] * 4 + [6 * i, 6 * i] for i in range(4)])
    for step in range(steps):
        shares = rng.dirichlet([4, 2, 1, 0.5, 0.5], 4)
        shares[:, :4] = -np.sort(-shares[:, :4], axis=1)
        true_rates = np.concatenate(
            [np.array([[first]]).repeat(4, 0), shares[:, 1:4] / (1 - shares[:, :1]) * 0.5 * later], 1
        )
        said = np.concatenate([shares[:, :4], np.array([[0.6, 0.2]]).repeat(4, 0)], axis=1)
        drawn = (rng.random((4, 1)) > true_rates.cumsum(1)).sum(1)  # 4: none of them
        accepted = np.zeros((4, 6), bool)
        accepted[np.arange(4)[drawn < 4], drawn[drawn < 4]] = True
        below = rng.random(4)  # the drafter's P(second | first is wrong) is 0.2 / (1 - 0.6)
        accepted[:, 4] = accepted[:, 0] & (below < first)
        accepted[:, 5] = accepted[:, 0] & ~accepted[:, 4] & (below < first + (1 - first) * 0.5 * later)
        made = forest(request, parent, np.log(said / (1 - said)).ravel(), 4)
        everything = np.ones(len(made), bool)
        paths = known.node_paths(running, made).reshape(4, 6)
        rows += [
            (rank, said[i, rank], paths[i, rank], accepted[i, rank], true_rates[i, rank])
            for i in range(4) for rank in range(4)
        ]  # fmt: skip
        known.age(0.02 * step)
        known.observe(running, made, everything, accepted.ravel(), trials(made, everything, accepted.ravel()))
    return np.array(rows)


def test_each_rank_is_calibrated_and_beats_its_mean_rate():
    """Acceptance rates have a calibration error of at most 0.05 per rank, and a log loss below that of the rank's mean
    rate."""
    rows = serve(acceptance(), 1500, 0)[4 * 4 * 300 :]
    for rank in range(WIDTH):
        _, _, path, taken, _ = rows[rows[:, 0] == rank].T
        assert abs(path.mean() - taken.mean()) <= 0.05
        if rank:
            rate = taken.mean()
            own = -(taken * np.log(np.maximum(path, 1e-6)) + (1 - taken) * np.log1p(-path)).mean()
            blind = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
            assert own < blind, rank


def test_unscored_node_with_an_accepted_parent_counts():
    """The target's token after an accepted parent is known, so it is a trial even of a child that was not scored."""
    known = acceptance()
    made, scored = forest([0, 0], [ROOT, ROOT], [0.0, -1.0], 1), np.array([True, False])
    before = known.node_paths(batch(1), made)[1]
    for _ in range(30):
        known.observe(batch(1), made, scored, np.array([False, True]), np.zeros(2, bool))
    assert known.node_paths(batch(1), made)[1] > 1.2 * before


def offered(requests: int, chain: float, later: float, pass_s: float = 2e-4, most: int = 400) -> DraftOptions:
    """A pool of one drafter with acceptance rate `chain` at each depth, and its beams."""
    paths = np.full((1, DEPTH, requests), chain).cumprod(axis=1)
    seconds = 1e-2 + 1e-5 * np.arange(most + 1)
    price = Price(seconds, np.zeros(requests), requests / 1e-2, 1e-5)
    place = [chain]
    for _ in range(WIDTH - 1):
        place.append(later * (1 - sum(place)))
    beams = Beams(np.array(place)[None, None].repeat(DEPTH, 1), np.full((1, DEPTH), chain), np.array([WIDTH]))
    wide_s = pass_s * (1 + 0.02 * np.arange(WIDTH))[None]
    return DraftOptions(
        paths, np.ones((1, DEPTH)), np.array([True]), np.array([True]), np.array([3e-4]), wide_s, np.zeros(1),
        price, DEPTH, most, none_behind(requests), beams,
    )  # fmt: skip


def priced(pool: DraftOptions, token_s: float) -> DraftOptions:
    """The pool with another price of a verified token."""
    seconds = pool.price.target_s[0] + token_s * np.arange(len(pool.price.target_s))
    return pool._replace(price=pool.price._replace(target_s=seconds, token_s=token_s))


@pytest.mark.parametrize("later", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("token_s", [1e-6, 1e-4, 5e-4, 4e-3])
@pytest.mark.parametrize("chain", [0.2, 0.5, 0.85])
def test_depth_and_width_are_the_argmax(chain, token_s, later):
    """Compared with every depth and width, counted by hand: places that pay for their token, and the passes. Chains and
    k = 0 are among them."""
    requests = 4
    pool = priced(offered(requests, chain, later), token_s)
    rate, best = pool.price.rate, -pool.price.rate * pool.price.target_s[0]
    for width, depth in itertools.product(range(1, WIDTH + 1), range(1, DEPTH + 1)):
        gain, nodes, reach = 0.0, 0, 1.0
        for _ in range(depth):
            paths = [path for path in reach * pool.beams.places[0, 0, :width] if path > rate * token_s]
            gain, nodes, reach = gain + sum(paths), nodes + len(paths), sum(paths)
        seconds = 3e-4 + (depth - 1) * pool.pass_s[0, width - 1] + pool.price.target_s[requests * nodes]
        best = max(best, requests * gain - rate * seconds)
    choice = choose(pool)
    assert choice.value == pytest.approx(best, abs=1e-9)
    if choice.runs:
        assert choice.drafts_s == 3e-4 + (choice.draft_lengths[0] - 1) * pool.pass_s[0, choice.widths[0] - 1]


def test_token_price_decides_between_trees_chains_and_nothing():
    pool = offered(4, 0.5, 0.5)
    choice = {token_s: choose(priced(pool, token_s)) for token_s in (1e-6, 7e-4, 2e-2)}
    assert choice[1e-6].widths[0] > 1
    assert choice[7e-4].runs
    assert choice[7e-4].widths[0] == 1
    assert not choice[2e-2].runs


@pytest.mark.parametrize(("match", "first"), [(0.97, 0), (0.9, 1)])
def test_lookup_comes_first_if_that_beats_trees_for_all(match, first):
    """Either the model's trees serve only requests that the lookup misses, or they serve all."""
    pool = offered(4, 0.5, 0.5)
    beams = Beams(
        np.concatenate([np.zeros_like(pool.beams.places), pool.beams.places]), np.full((2, DEPTH), 0.5),
        np.array([1, WIDTH]),
    )  # fmt: skip
    both = pool._replace(
        paths=np.concatenate([np.full((1, DEPTH, 4), match).cumprod(axis=1), pool.paths]),
        hit_rates=np.concatenate([np.full((1, DEPTH), 0.4), pool.hit_rates]),
        autoregressive=np.array([False, True]), stands_in=np.array([False, True]), first_s=np.array([1e-5, 3e-4]),
        pass_s=np.concatenate([np.zeros((1, WIDTH)), pool.pass_s]), token_s=np.zeros(2), beams=beams,
    )  # fmt: skip
    choice = choose(priced(both, 1e-6))
    assert (choice.drafter_order[0] == first).all()
    assert (choice.drafter_order[1] == (1 if first == 0 else NO_DRAFTER)).all()
    assert choice.widths.tolist() == [1, WIDTH]


def test_two_models_with_trees_serve_the_requests_they_know():
    """Each serves the requests that it knows, at the width that suits it: better than either alone."""
    narrow, wide = offered(4, 0.7, 0.1), offered(4, 0.5, 0.6)
    paths = np.concatenate([narrow.paths, wide.paths])
    paths[0, :, 2:], paths[1, :, :2] = 0.0, 0.0
    both = priced(narrow, 1e-5)._replace(
        paths=paths, hit_rates=np.ones(paths.shape[:2]), autoregressive=np.ones(2, bool), stands_in=np.ones(2, bool),
        first_s=np.full(2, 3e-4),
        pass_s=np.concatenate([narrow.pass_s, wide.pass_s]), token_s=np.zeros(2),
        beams=Beams(*(np.concatenate(pair) for pair in zip(narrow.beams, wide.beams, strict=True))),
    )  # fmt: skip
    choice = choose(both)
    assert choice.drafter_order[0].tolist() == [0, 0, 1, 1]
    for d in range(2):
        alone = both.paths.copy()
        alone[1 - d] = 0.0
        assert choice.value > choose(both._replace(paths=alone)).value


def test_requests_without_tokens_left_get_no_tree():
    pool = offered(4, 0.5, 0.5)
    paths = pool.paths.copy()
    paths[:, :, 1:] = 0.0
    choice = choose(priced(pool._replace(paths=paths), 1e-6))
    assert (choice.drafter_order[0] == [0, NO_DRAFTER, NO_DRAFTER, NO_DRAFTER]).all()
