"""Acceptance rates: calibrated by depth and request; from real trials only; decaying with time."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from outrider_runtime.control.acceptance import (
    BONUS_TOKEN,
    GUARANTEED_TOKENS,
    Acceptance,
    Counts,
    chain_paths,
)
from outrider_runtime.control.batch import NO_DRAFTER, Columns
from outrider_runtime.control.plans import trials
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.verify import WHAT_PAYS, WaitingNodes, paths_to_score

from tests.unit.control.columns import batch, kept, proposals

EAGLE, LOOKUP = Drafter("eagle", passes=True, needs_hidden=True), Drafter("pld")


def acceptance(*drafters: Drafter, length: int = 4, slots: int = 16) -> Acceptance:
    return Acceptance(Settings(drafters or (EAGLE,), length, slots))


def by_request(probability):
    """An acceptance rate for each request."""
    return lambda _rng, request: probability(request)


def always(probability):
    return by_request(lambda _request: probability)


def serve(known: Acceptance, steps: int, chance, *, requests: int = 8, length: int = 4, seed: int = 0, **columns):
    """Verify every request's whole chain in each of `steps`. chance(rng, request) -> acceptance rate.

    Returns (path probability of the node, whether it and all before it were accepted, depth) of every trial.
    """
    rng, forecasts = np.random.default_rng(seed), []
    for step in range(steps):
        running = batch(requests, now_s=float(step) * 0.02, **columns)
        probability = np.array([chance(rng, i) for i in range(requests) for _ in range(length)])
        forest = proposals([length] * requests)
        hits = (rng.random(len(probability)) < probability).reshape(requests, length)
        accepted = kept(forest, hits.cumprod(axis=1).sum(axis=1).tolist())
        forecasts += list(zip(known.node_paths(running, forest), accepted, forest.depth, strict=True))
        known.age(running.now_s)
        whole = np.ones(len(forest), bool)
        known.observe(running, forest, whole, accepted, trials(forest, whole, accepted))
    return np.array(forecasts)


def paths(known: Acceptance, running):
    """(D, K, N) path probabilities of all requests' chains at any length, and (D, K) hit rates."""
    rows, usable = np.arange(len(running)), np.ones(len(known.acceptance_rates), bool)
    columns = Counts(*known.columns), Columns(*running.columns)
    return chain_paths(*columns, rows, usable, known.acceptance_rates.shape[1], GUARANTEED_TOKENS)


def test_path_probabilities_are_calibrated():
    """Held-out calibration error at most 0.05: of the nodes with path probability p, a share p is accepted."""

    forecasts = serve(acceptance(), 400, lambda rng, request: rng.beta(2, 1) * (1.2 if request % 2 else 0.5))[3200:]
    said, happened = forecasts[:, 0], forecasts[:, 1]
    bins = np.digitize(said, np.quantile(said, np.linspace(0.1, 0.9, 9)))
    errors = [abs(said[bins == b].mean() - happened[bins == b].mean()) for b in range(10)]
    assert np.mean(errors) <= 0.05
    assert np.corrcoef(said, happened)[0, 1] > 0.4  # and it separates likely from unlikely nodes


def test_lone_request_counts_its_evidence_once():
    """A lone request's trials move the pool's rate; its own factor must not move as well."""
    known = acceptance()
    serve(known, 10, always(1.0), requests=1, length=1)
    path = paths(known, batch(1))[0][0, 0, 0]
    assert path == pytest.approx((10 + 4 * 0.6) / 14, abs=0.02)


def test_unusual_request_is_known_by_its_slot_until_it_ends():
    """Request 0 is easy, the others are hard; the next request in its slot starts without history."""
    known = acceptance()
    serve(known, 30, by_request(lambda i: 0.9 if i == 0 else 0.3))
    first = paths(known, batch(8))[0][0, 0]
    assert first[0] > 0.65
    assert first[1:].max() < 0.5
    known.release(np.array([0]))
    assert paths(known, batch(8))[0][0, 0, 0] == pytest.approx(first[1:].mean(), abs=0.12)


def test_rejected_branches_and_unverified_nodes_are_no_trials():
    """Otherwise deep positions would look hopeless, and a short verification would look like bad proposals."""
    known = acceptance()
    forest = proposals([4])
    accepted = kept(forest, [1])
    verified = forest.depth <= 3
    known.observe(batch(1), forest, verified, accepted, trials(forest, verified, accepted))
    assert Counts(*known.columns).tried[0].tolist() == [1, 1, 0, 0]


def test_evidence_decays_without_observations():
    """Nothing is tried at k = 0: if evidence did not decay, the estimate that led to k = 0 would never change."""
    known = acceptance()
    serve(known, 50, always(0.05))
    low = known.acceptance_rates[0, 0]
    known.age(300.0)
    assert low < 0.15
    assert known.acceptance_rates[0, 0] > 0.45


@pytest.mark.parametrize("now_s", [math.nan, math.inf, -math.inf, 0.0])
def test_clock_without_a_finite_time_decays_nothing(now_s):
    """Bug: after one step whose time was not a number, no estimate was a number."""
    known = acceptance()
    serve(known, 50, always(0.05))
    low = known.acceptance_rates.copy()
    known.age(now_s)
    known.age(2.0)
    assert known.acceptance_rates == pytest.approx(low, rel=0.1)
    known.age(302.0)
    assert known.acceptance_rates[0, 0] > 0.45


def test_changed_traffic_is_noticed_within_25_steps():
    """Eight requests whose prompts change from easy to hard."""
    known = acceptance()
    serve(known, 100, always(0.9))
    serve(known, 25, always(0.2), seed=1)
    assert known.acceptance_rates[0, 0] < 0.4


def test_hit_rate_of_a_lookup_is_learned():
    """The lookup hits for only the first of eight requests."""
    known = acceptance(LOOKUP)
    for step in range(20):
        forest = proposals([4] + [0] * 7)
        whole = np.ones(4, bool)
        known.observe(batch(8, now_s=step * 0.02), forest, whole, kept(forest, [4] + [0] * 7), whole)
    hits = paths(known, batch(8))[1]
    assert hits[0, 0] == pytest.approx(1 / 8, abs=0.03)


def test_placeholder_path_mixes_lookup_and_model():
    """path[k] = hit[d, k] * prod(acceptance of d) + (1 - hit[d, 1]) * hit[e, k] * prod(acceptance of e).

    Bug: each placeholder counted as a proposal of the lookup, whether it finds anything or not. Here a lookup has two
    tokens half of the time and a model always has three: the third placeholder is the model's."""
    known = Acceptance(Settings((LOOKUP, Drafter("model", passes=True)), 4, 16))
    for step in range(30):
        matches = step % 2
        forest = proposals([2 * matches], drafters=2)
        forest = dataclasses.replace(forest, lengths=np.array([2, 3]))
        whole = np.ones(len(forest), bool)
        accepted, tried = kept(forest, [matches]), trials(forest, whole, whole)
        known.observe(batch(1, 2, now_s=step * 0.02), forest, whole, accepted, tried)
    running, forest = batch(1, 2), proposals([4], drafters=2)
    counts, columns = Counts(*known.columns), Columns(*running.columns)
    chain, hit = chain_paths(counts, columns, np.arange(1), np.ones(2, bool), 4, BONUS_TOKEN)
    assert hit[0, 0] == pytest.approx(0.5, abs=0.05)
    lookup, model = hit[0, :2] * chain[0, :2, 0], (1 - hit[0, 0]) * hit[1, 0] * chain[1, :3, 0]
    both = np.array([lookup[0] + model[0], lookup[1] + model[1], model[2], 0.0])
    real = [hit[0, 0] + (1 - hit[0, 0]) * hit[1, 0], hit[0, 1] + (1 - hit[0, 0]) * hit[1, 0]]
    real += [(1 - hit[0, 0]) * hit[1, 0], 0.0]
    for second, expected, is_real in ((1, both, real), (NO_DRAFTER, [*lookup, 0.0, 0.0], [*hit[0, :2], 0.0, 0.0])):
        waiting = WaitingNodes(
            forest.columns, np.array([2, 3]), np.array([[0], [second]]), np.ones(1, bool), True, WHAT_PAYS
        )
        path = paths_to_score(counts, columns, waiting)
        assert path.expected == pytest.approx(expected)
        assert path.real == pytest.approx(is_real)
        alone = paths_to_score(counts, columns, waiting._replace(device_ranks=False))
        assert alone.ranked == pytest.approx(expected)
        assert (alone.real == 1.0).all()


def test_hit_rates_never_rise_with_depth():
    """Bug: a lookup with a low hit rate was assumed to hit for certain at a depth that was never tried."""
    known = acceptance(LOOKUP)
    for step in range(20):
        forest = dataclasses.replace(proposals([0] * 8), lengths=np.array([1]))
        known.observe(batch(8, now_s=step * 0.02), forest, *([np.zeros(0, bool)] * 3))
    hit = paths(known, batch(8))[1][0]
    assert hit[0] < 0.05
    assert (hit <= hit[0]).all()
