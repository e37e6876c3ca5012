"""Acceptance rates: calibrated by depth, confidence, class and request; from real trials only; decaying with time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from outrider_runtime.control.acceptance.estimate import (
    BONUS_TOKEN,
    GUARANTEED_TOKENS,
    Acceptance,
    chain_paths,
    placeholder_paths,
)
from outrider_runtime.control.acceptance.trials import Counts
from outrider_runtime.control.data.batch import NO_DRAFTER, Columns
from outrider_runtime.control.data.forest import Nodes, trials
from outrider_runtime.control.settings import MATCH_EDGES, Drafter, HotSettings, Settings, SLOClass

from tests.unit.control.columns import batch, kept, proposals

EAGLE, LOOKUP = Drafter("eagle", passes=True, needs_hidden=True), Drafter("pld", confidence_edges=MATCH_EDGES)
CLASSES = HotSettings(slo_classes=(SLOClass("chat", 0.05), SLOClass("bulk", 0.5)))


def acceptance(*drafters: Drafter, length: int = 4, slots: int = 16) -> Acceptance:
    return Acceptance(Settings(drafters or (EAGLE,), length, slots, hot=CLASSES))


def by_request(probability):
    """An acceptance rate for each request, of a drafter that reports no confidence."""
    return lambda _rng, request: (np.nan, probability(request))


def always(probability):
    return by_request(lambda _request: probability)


def serve(known: Acceptance, steps: int, chance, *, requests: int = 8, length: int = 4, seed: int = 0, **columns):
    """Verify every request's whole chain in each of `steps`. chance(rng, request) -> (confidence, acceptance rate).

    Returns (path probability of the node, whether it and all before it were accepted, depth) of every trial.
    """
    rng, forecasts = np.random.default_rng(seed), []
    for step in range(steps):
        running = batch(requests, now_s=float(step) * 0.02, **columns)
        drawn = [chance(rng, i) for i in range(requests) for _ in range(length)]
        confidence, probability = (np.array(column) for column in zip(*drawn, strict=True))
        forest = proposals([length] * requests, confidence=confidence)
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

    def chance(rng, request):
        probability = rng.beta(2, 1)
        said = 0.5 * np.log(probability / (1 - probability)) + rng.normal(0, 0.3)  # the drafter is too modest
        return said, probability * (0.95 if request % 2 else 0.85)

    forecasts = serve(acceptance(), 400, chance)[8 * 4 * 100 :]
    said, happened = forecasts[:, 0], forecasts[:, 1]
    bins = np.digitize(said, np.quantile(said, np.linspace(0.1, 0.9, 9)))
    errors = [abs(said[bins == b].mean() - happened[bins == b].mean()) for b in range(10)]
    assert np.mean(errors) <= 0.05
    assert np.corrcoef(said, happened)[0, 1] > 0.4  # and it separates likely from unlikely nodes


def test_lone_request_counts_its_evidence_once():
    """A lone request's trials move the pool's rate; its own factor and its class's must not move as well."""
    known = acceptance()
    serve(known, 10, always(1.0), requests=1, length=1, slo_class=[0])
    path = paths(known, batch(1, slo_class=[0]))[0][0, 0, 0]
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


def test_classes_have_separate_rates():
    known = acceptance()
    columns: dict[str, Any] = {"slo_class": [0, 0, 0, 0, 1, 1, 1, 1]}
    for generation in range(12):
        serve(known, 8, by_request(lambda i: 0.9 if i < 4 else 0.3), seed=generation, **columns)
        known.release(np.arange(8))
    first = paths(known, batch(8, **columns))[0][0, 0]
    assert first[0] > first[7] + 0.25


def test_rejected_branches_and_unverified_nodes_are_no_trials():
    """Otherwise deep positions would look hopeless, and a short verification would look like bad proposals."""
    known = acceptance()
    forest = proposals([4])
    accepted = kept(forest, [1])
    verified = forest.depth <= 3
    known.observe(batch(1), forest, verified, accepted, trials(forest, verified, accepted))
    assert Counts(*known.columns).tried[0, :, -1].tolist() == [1, 1, 0, 0]


def test_evidence_decays_without_observations():
    """Nothing is tried at k = 0: if evidence did not decay, the estimate that led to k = 0 would never change."""
    known = acceptance()
    serve(known, 50, always(0.05))
    low = known.acceptance_rates[0, 0, -1]
    known.age(300.0)
    assert low < 0.15
    assert known.acceptance_rates[0, 0, -1] > 0.45


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
    assert known.acceptance_rates[0, 0, -1] > 0.45


def test_changed_traffic_is_noticed_within_25_steps():
    """Eight requests whose prompts change from easy to hard."""
    known = acceptance()
    serve(known, 100, always(0.9))
    serve(known, 25, always(0.2), seed=1)
    assert known.acceptance_rates[0, 0, -1] < 0.4


def test_hit_rate_of_a_lookup_is_learned():
    """The lookup hits for only the first of eight requests."""
    known = acceptance(LOOKUP)
    for step in range(20):
        forest = proposals([4] + [0] * 7)
        whole = np.ones(4, bool)
        known.observe(batch(8, now_s=step * 0.02), forest, whole, kept(forest, [4] + [0] * 7), whole)
    offers = paths(known, batch(8))[1]
    assert offers[0, 0] == pytest.approx(1 / 8, abs=0.03)


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
    path = np.zeros(4)
    order, waiting = np.array([[0], [1]]), np.ones(1, bool)
    nodes = Nodes(*forest.columns)
    placeholder_paths(counts, columns, nodes, order, np.array([2, 3]), waiting, path)
    assert hit[0, 0] == pytest.approx(0.5, abs=0.05)
    lookup, model = hit[0, :2] * chain[0, :2, 0], (1 - hit[0, 0]) * hit[1, 0] * chain[1, :3, 0]
    assert path == pytest.approx([lookup[0] + model[0], lookup[1] + model[1], model[2], 0.0])
    placeholder_paths(counts, columns, nodes, np.array([[0], [NO_DRAFTER]]), np.array([2, 3]), waiting, path)
    assert path == pytest.approx([lookup[0], lookup[1], 0.0, 0.0])


def test_hit_rates_never_rise_with_depth():
    """Bug: a lookup with a low hit rate was assumed to hit for certain at a depth that was never tried."""
    known = acceptance(LOOKUP)
    for step in range(20):
        forest = dataclasses.replace(proposals([0] * 8), lengths=np.array([1]))
        known.observe(batch(8, now_s=step * 0.02), forest, *([np.zeros(0, bool)] * 3))
    hit = paths(known, batch(8))[1][0]
    assert hit[0] < 0.05
    assert (hit <= hit[0]).all()
