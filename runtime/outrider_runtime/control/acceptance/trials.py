"""What trials teach: discounted counts by depth and bin of confidence, and how often drafters propose anything.

Shapes: D drafters, K depths, B bins, G groups (see `groups`); N requests, M nodes, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.acceptance.groups import LEAST, MOST, MOST_TRIALS, count_trial, pool_tried
from outrider_runtime.control.acceptance.trees import count_trees
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NOBODY, Bools, Columns, Floats, Ints
from outrider_runtime.control.data.forest import Nodes

BINS = 8
ANY = BINS
"""Column of all bins together: what is known before there is a confidence."""
PRIOR, PRIOR_TRIALS = 0.6, 4.0
DEPTH_TRIALS = 12.0
"""What the depth before it counts for in a depth's estimate: few requests reach deep positions, the easy ones first."""
BIN_TRIALS = 6.0
MET_TRIALS, MET_ASKED = 12.0, 24.0
"""Tried, or asked, so often, a drafter is no stranger."""
HIT_TRIALS = 2.0


class Verdicts(NamedTuple):
    """What came of a step's nodes, as `Outcome` has it. All (M,)."""

    verified: Bools
    accepted: Bools
    tried: Bools


class Counts(NamedTuple):
    """All that is counted, in place, and what follows from it."""

    tried: Floats
    """(D, K, B+1)"""
    accepted: Floats
    """(D, K, B+1)"""
    hazards: Floats
    """(D, K, B+1): posterior means, without the factors."""
    groups: Floats
    """(D, G, 5)"""
    asked: Floats
    """(D, K): how often so many tokens were asked for."""
    offered: Floats
    """(D, K): how often there were as many."""
    classes: int
    """Of SLOs, without that of none."""
    met: Bools
    """(D,): drafters that were tried often enough once to be no strangers."""
    edges: Floats
    """(D, B-1): between the bins of confidence."""
    passes: Bools
    """(D,): see `settings.Drafter`."""
    stands_in: Bools
    """(D,): see `settings.Drafter`."""
    most: Ints
    """(D,): tokens that each proposes for a request at most."""
    widest: Ints
    """(D,): see `settings.Drafter`."""
    ranks: Floats
    """(D, W, 2): of later children, see `trees`. W: 1 where nobody can propose trees."""
    places: Floats
    """(D, K, W, 2): of beams, see `trees`."""


@compiled
def bin_of(confidence: float, edges: Floats) -> int:
    """The column of a confidence; edges: (B-1,) of its drafter."""
    return ANY if np.isnan(confidence) else int(np.searchsorted(edges, confidence))


@compiled
def observe(
    known: Counts, batch: Columns, nodes: Nodes, asked: Ints, lengths: Ints, verdicts: Verdicts
) -> None:  # fmt: skip
    """Count a step's trials. asked (R, N), lengths (D,): see `Forest`. A later child is no trial of a chain."""
    accepted, trials = verdicts.accepted, verdicts.tried
    if known.ranks.shape[1] > 1:
        count_trees(known.ranks, known.places, nodes, verdicts.verified, accepted, len(batch.slot))
        trials = trials & (nodes.rank == 0)
    _count_hits(known, nodes, asked, lengths, batch.left)
    classes, depths, bins = known.classes, known.hazards.shape[1], np.empty(len(trials), np.int64)
    for m in range(len(trials)):
        bins[m] = bin_of(nodes.confidence[m], known.edges[nodes.drafter[m]])
    _count_trials(known, nodes, bins, trials, accepted)
    for m in np.flatnonzero(trials):
        d, i = nodes.drafter[m], nodes.request[m]
        chances, groups = known.hazards[d, min(nodes.depth[m], depths) - 1], known.groups[d]
        rows = (min(batch.slo_class[i], classes - 1) + 1, classes + 1 + batch.slot[i])
        count_trial(groups, pool_tried(groups, classes), rows, chances[bins[m]], chances[ANY], accepted[m])
    for d in range(len(known.met)):
        known.met[d] |= known.tried[d, 0, ANY] >= MET_TRIALS or known.asked[d, 0] >= MET_ASKED


@compiled
def _count_hits(known: Counts, nodes: Nodes, asked_of: Ints, lengths: Ints, left: Ints) -> None:
    """Proposals that a request has no tokens left for are not missed."""
    asked, offered = known.asked, known.offered
    (drafters, depths), requests = asked.shape, asked_of.shape[1]
    deepest = np.zeros((drafters, requests), np.int64)
    for m in range(len(nodes.request)):
        d, i = nodes.drafter[m], nodes.request[m]
        deepest[d, i] = max(deepest[d, i], nodes.depth[m])
    for i in range(requests):
        for rank in range(asked_of.shape[0]):
            d = asked_of[rank, i]
            if d == NOBODY:
                break
            found = min(deepest[d, i], depths)
            asked[d, : min(max(min(lengths[d], left[i] - 1), found), depths)] += 1.0
            offered[d, :found] += 1.0
            if found > 0:
                break
    for d in range(drafters):
        for k in range(depths):
            keep = min(1.0, MOST_TRIALS / max(asked[d, k], 1e-9))
            asked[d, k] *= keep
            offered[d, k] *= keep


@compiled
def _count_trials(known: Counts, nodes: Nodes, bins: Ints, trials: Bools, accepted: Bools) -> None:
    """Count for depths and bins."""
    tried, successes = known.tried, known.accepted
    for m in np.flatnonzero(trials):
        d, k = nodes.drafter[m], min(nodes.depth[m], tried.shape[1]) - 1
        tried[d, k, ANY] += 1.0
        successes[d, k, ANY] += accepted[m]
        if bins[m] != ANY:
            tried[d, k, bins[m]] += 1.0
            successes[d, k, bins[m]] += accepted[m]
    _limit(tried, successes)
    refresh(known)


@compiled
def _limit(tried: Floats, successes: Floats) -> None:
    for d in range(tried.shape[0]):
        for k in range(tried.shape[1]):
            for b in range(tried.shape[2]):
                if tried[d, k, b] > MOST_TRIALS:
                    successes[d, k, b] *= MOST_TRIALS / tried[d, k, b]
                    tried[d, k, b] = MOST_TRIALS


@compiled
def refresh(known: Counts) -> None:
    """Posterior means: each depth shrinks to the one before it, the first to the prior; each bin to its depth."""
    tried, accepted, hazards = known.tried, known.accepted, known.hazards
    for d in range(tried.shape[0]):
        mean, strength = PRIOR, PRIOR_TRIALS
        for k in range(tried.shape[1]):
            mean = (accepted[d, k, ANY] + strength * mean) / (tried[d, k, ANY] + strength)
            hazards[d, k, ANY] = min(mean, MOST)
            strength = DEPTH_TRIALS
            for b in range(BINS):
                own = (accepted[d, k, b] + BIN_TRIALS * mean) / (tried[d, k, b] + BIN_TRIALS)
                hazards[d, k, b] = min(max(own, LEAST), MOST)
