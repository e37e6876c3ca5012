"""What trials teach: decaying counts of acceptances by depth and bin of confidence, and of hits.

Shapes: D drafters, K depths, B bins, G groups (see `groups`); N requests, M nodes, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.acceptance.groups import LEAST, MOST, MOST_TRIALS, count_trial, pool_tried
from outrider_runtime.control.acceptance.trees import count_trees
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NO_DRAFTER, Bools, Columns, Floats, Ints
from outrider_runtime.control.data.forest import Nodes

BINS = 8
"""Bins of a drafter's confidence."""
ANY = BINS
"""Column for all bins together, used while the confidence is not known."""
PRIOR, PRIOR_TRIALS = 0.6, 4.0
"""Prior acceptance rate of the first depth, and the trials that it counts for."""
DEPTH_TRIALS = 12.0
"""Trials that the rate of the depth before counts for in a depth's rate: few requests reach deep positions, and those
are the easy ones."""
BIN_TRIALS = 6.0
"""Trials that a depth's rate counts for in the rate of each of its bins."""
HISTORY_TRIALS, HISTORY_REQUESTS = 12.0, 24.0
"""A drafter has history after so many trials of its first position, or so many scheduled requests."""
HIT_TRIALS = 2.0
"""Trials that a hit rate of 1 counts for."""


class Verdicts(NamedTuple):
    """The verdicts on a step's nodes, see `Outcome`. All (M,)."""

    verified: Bools
    accepted: Bools
    tried: Bools


class Counts(NamedTuple):
    """All counts, which are updated in place, and the rates that follow from them."""

    tried: Floats
    """(D, K, B+1)"""
    accepted: Floats
    """(D, K, B+1)"""
    acceptance_rates: Floats
    """(D, K, B+1): posterior means, without the factors of class and request."""
    groups: Floats
    """(D, G, 5): see `groups`."""
    scheduled: Floats
    """(D, K): number of scheduled proposals of at least that depth."""
    proposed: Floats
    """(D, K): how many of them the drafter had."""
    classes: int
    """SLO classes, not counting "no class"."""
    has_history: Bools
    """(D,): drafters that once had enough trials to trust their estimates."""
    edges: Floats
    """(D, B-1): edges between the bins of confidence."""
    passes: Bools
    """(D,): see `settings.Drafter`."""
    stands_in: Bools
    """(D,): see `settings.Drafter`."""
    most: Ints
    """(D,): largest draft length of each drafter."""
    widest: Ints
    """(D,): see `settings.Drafter`."""
    ranks: Floats
    """(D, W, 2): counts of later children by rank, see `trees`. W is 1 if no drafter can propose trees."""
    places: Floats
    """(D, K, W, 2): counts of places in beams, see `trees`."""


@compiled
def bin_of(confidence: float, edges: Floats) -> int:
    """The column of a confidence. edges: (B-1,) of its drafter."""
    return ANY if np.isnan(confidence) else int(np.searchsorted(edges, confidence))


@compiled
def observe(
    known: Counts, batch: Columns, nodes: Nodes, drafter_order: Ints, lengths: Ints, verdicts: Verdicts
) -> None:  # fmt: skip
    """Count a step's trials. drafter_order (R, N), lengths (D,): see `Forest`. A later child is no trial of a chain."""
    accepted, trials = verdicts.accepted, verdicts.tried
    if known.ranks.shape[1] > 1:
        count_trees(known.ranks, known.places, nodes, verdicts.verified, accepted, len(batch.slot))
        trials = trials & (nodes.rank == 0)
    _count_hits(known, nodes, drafter_order, lengths, batch.left)
    classes, depths, bins = known.classes, known.acceptance_rates.shape[1], np.empty(len(trials), np.int64)
    for m in range(len(trials)):
        bins[m] = bin_of(nodes.confidence[m], known.edges[nodes.drafter[m]])
    _count_trials(known, nodes, bins, trials, accepted)
    for m in np.flatnonzero(trials):
        d, i = nodes.drafter[m], nodes.request[m]
        rates, groups = known.acceptance_rates[d, min(nodes.depth[m], depths) - 1], known.groups[d]
        rows = (min(batch.slo_class[i], classes - 1) + 1, classes + 1 + batch.slot[i])
        count_trial(groups, pool_tried(groups, classes), rows, rates[bins[m]], rates[ANY], accepted[m])
    for d in range(len(known.has_history)):
        known.has_history[d] |= known.tried[d, 0, ANY] >= HISTORY_TRIALS or known.scheduled[d, 0] >= HISTORY_REQUESTS


@compiled
def _count_hits(known: Counts, nodes: Nodes, drafter_order: Ints, lengths: Ints, left: Ints) -> None:
    """Count scheduled proposals and those that drafters had. A missing proposal does not count where the request may
    not produce a token for it."""
    scheduled, proposed = known.scheduled, known.proposed
    (drafters, depths), requests = scheduled.shape, drafter_order.shape[1]
    deepest = np.zeros((drafters, requests), np.int64)
    for m in range(len(nodes.request)):
        d, i = nodes.drafter[m], nodes.request[m]
        deepest[d, i] = max(deepest[d, i], nodes.depth[m])
    for i in range(requests):
        for rank in range(drafter_order.shape[0]):
            d = drafter_order[rank, i]
            if d == NO_DRAFTER:
                break
            length = min(deepest[d, i], depths)
            scheduled[d, : min(max(min(lengths[d], left[i] - 1), length), depths)] += 1.0
            proposed[d, :length] += 1.0
            if length > 0:
                break
    for d in range(drafters):
        for k in range(depths):
            keep = min(1.0, MOST_TRIALS / max(scheduled[d, k], 1e-9))
            scheduled[d, k] *= keep
            proposed[d, k] *= keep


@compiled
def _count_trials(known: Counts, nodes: Nodes, bins: Ints, trials: Bools, accepted: Bools) -> None:
    """Count trials and acceptances by depth and bin."""
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
    """Set the posterior means: each depth shrinks to the one before it, the first to the prior; each bin to its
    depth."""
    tried, accepted, acceptance_rates = known.tried, known.accepted, known.acceptance_rates
    for d in range(tried.shape[0]):
        mean, strength = PRIOR, PRIOR_TRIALS
        for k in range(tried.shape[1]):
            mean = (accepted[d, k, ANY] + strength * mean) / (tried[d, k, ANY] + strength)
            acceptance_rates[d, k, ANY] = min(mean, MOST)
            strength = DEPTH_TRIALS
            for b in range(BINS):
                own = (accepted[d, k, b] + BIN_TRIALS * mean) / (tried[d, k, b] + BIN_TRIALS)
                acceptance_rates[d, k, b] = min(max(own, LEAST), MOST)
