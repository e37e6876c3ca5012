"""What trials teach: discounted counts by depth and bin of confidence, and how often lookups find something.

Shapes: D drafters, K depths, B bins, G groups (see `groups`), S slots; N requests, M nodes, R ranks.
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
RECENT_TRIALS, ALARM_SIGMAS = 24.0, 3.5
MET_TRIALS, MET_ASKED = 12.0, 24.0
"""Tried, or asked, so often, a drafter is no stranger."""
HIT_TRIALS, SLOT_HIT_TRIALS, MOST_SLOT_HITS = 2.0, 3.0, 20.0


class Verdicts(NamedTuple):
    """What came of a step's nodes, as `Outcome` has it. All (M,)."""

    verified: Bools
    accepted: Bools
    tried: Bools


class Counts(NamedTuple):
    """All that is counted, in place, and what follows from it. S slots."""

    tried: Floats
    """(D, K, B+1)"""
    accepted: Floats
    """(D, K, B+1)"""
    hazards: Floats
    """(D, K, B+1): posterior means, without the factors."""
    groups: Floats
    """(D, G, 5)"""
    recent: Floats
    """(D, 3): accepted, expected and variance of the last trials."""
    asked: Floats
    """(D, K): how often so many tokens were asked for."""
    offered: Floats
    """(D, K): how often there were as many."""
    slot_hits: Floats
    """(S, D, 2): how often it was asked, and found something."""
    met: Bools
    """(D,): drafters that were tried often enough once to be no strangers."""
    edges: Floats
    """(D, B-1): between the bins of confidence."""
    passes: Bools
    """(D,): see `settings.Drafter`."""
    widest: Ints
    """(D,): see `settings.Drafter`."""
    ranks: Floats
    """(D, W, 2): of later children, see `trees`. W: 1 where nobody can propose trees."""
    places: Floats
    """(D, K, W, 2): of beams, see `trees`."""


@compiled
def class_count(known: Counts) -> int:
    """Classes, without that of none."""
    return int(known.groups.shape[1] - 1 - known.slot_hits.shape[0])


@compiled
def bin_of(confidence: float, edges: Floats) -> int:
    """The column of a confidence; edges: (B-1,) of its drafter."""
    return ANY if np.isnan(confidence) else int(np.searchsorted(edges, confidence))


@compiled
def observe(
    known: Counts, batch: Columns, nodes: Nodes, asked: Ints, lengths: Ints, verdicts: Verdicts
) -> int:  # fmt: skip
    """Count a step's trials. asked (R, N), lengths (D,): see `Forest`. Returns how many drafters' last trials
    contradict their estimates. A later child is no trial of a chain."""
    accepted, trials = verdicts.accepted, verdicts.tried
    if known.ranks.shape[1] > 1:
        count_trees(known.ranks, known.places, nodes, verdicts.verified, accepted, len(batch.slot))
        trials = trials & (nodes.rank == 0)
    _count_hits(known, nodes, asked, lengths, batch.slot)
    classes, depths, bins = class_count(known), known.hazards.shape[1], np.empty(len(trials), np.int64)
    for m in range(len(trials)):
        bins[m] = bin_of(nodes.confidence[m], known.edges[nodes.drafter[m]])
    alarms = _count_trials(known, nodes, bins, trials, accepted)
    for m in np.flatnonzero(trials):
        d, i = nodes.drafter[m], nodes.request[m]
        chances, groups = known.hazards[d, min(nodes.depth[m], depths) - 1], known.groups[d]
        rows = (min(batch.slo_class[i], classes - 1) + 1, classes + 1 + batch.slot[i])
        count_trial(groups, pool_tried(groups, classes), rows, chances[bins[m]], chances[ANY], accepted[m])
    for d in range(len(known.met)):
        known.met[d] |= known.tried[d, 0, ANY] >= MET_TRIALS or known.asked[d, 0] >= MET_ASKED
    return alarms


@compiled
def _count_hits(known: Counts, nodes: Nodes, asked_of: Ints, lengths: Ints, slot: Ints) -> None:
    asked, offered = known.asked, known.offered
    drafters, depths = asked.shape
    deepest = np.zeros((drafters, len(slot)), np.int64)
    for m in range(len(nodes.request)):
        d, i = nodes.drafter[m], nodes.request[m]
        deepest[d, i] = max(deepest[d, i], nodes.depth[m])
    for i in range(len(slot)):
        for rank in range(asked_of.shape[0]):
            d = asked_of[rank, i]
            if d == NOBODY:
                break
            found = min(deepest[d, i], depths)
            asked[d, : min(max(lengths[d], found), depths)] += 1.0
            offered[d, :found] += 1.0
            own = known.slot_hits[slot[i], d]
            own *= min(1.0, MOST_SLOT_HITS / (own[0] + 1.0))
            own[0] += 1.0
            own[1] += found > 0
            if found > 0:
                break
    for d in range(drafters):
        for k in range(depths):
            keep = min(1.0, MOST_TRIALS / max(asked[d, k], 1e-9))
            asked[d, k] *= keep
            offered[d, k] *= keep


@compiled
def _count_trials(known: Counts, nodes: Nodes, bins: Ints, trials: Bools, accepted: Bools) -> int:
    """Count for depths and bins. Returns how many drafters' last trials contradict their estimates."""
    tried, successes, hazards, recent = known.tried, known.accepted, known.hazards, known.recent
    for m in np.flatnonzero(trials):
        d, k = nodes.drafter[m], min(nodes.depth[m], hazards.shape[1]) - 1
        _surprise(recent[d], hazards[d, k, bins[m]], accepted[m])
        tried[d, k, ANY] += 1.0
        successes[d, k, ANY] += accepted[m]
        if bins[m] != ANY:
            tried[d, k, bins[m]] += 1.0
            successes[d, k, bins[m]] += accepted[m]
    _limit(tried, successes)
    alarms = 0
    for d in range(hazards.shape[0]):
        if abs(recent[d, 0] - recent[d, 1]) > ALARM_SIGMAS * np.sqrt(recent[d, 2] + 0.5):
            _start_anew(known, d)
            alarms += 1
    refresh(known)
    return alarms


@compiled
def _surprise(recent: Floats, expected: float, accepted: bool) -> None:
    recent *= 1.0 - 1.0 / RECENT_TRIALS
    recent[0] += accepted
    recent[1] += expected
    recent[2] += expected * (1.0 - expected)


@compiled
def _limit(tried: Floats, successes: Floats) -> None:
    for d in range(tried.shape[0]):
        for k in range(tried.shape[1]):
            for b in range(tried.shape[2]):
                if tried[d, k, b] > MOST_TRIALS:
                    successes[d, k, b] *= MOST_TRIALS / tried[d, k, b]
                    tried[d, k, b] = MOST_TRIALS


@compiled
def _start_anew(known: Counts, d: int) -> None:
    """The last trials of a drafter become what is known of it, and that counts for little."""
    tried, recent = known.tried[d], known.recent[d]
    ratio = recent[0] / max(recent[1], 1e-9)
    for k in range(tried.shape[0]):
        for b in range(tried.shape[1]):
            tried[k, b] = min(tried[k, b], RECENT_TRIALS / 2)
            known.accepted[d, k, b] = min(max(known.hazards[d, k, b] * ratio, LEAST), MOST) * tried[k, b]
    known.groups[d] = 0.0
    recent[:] = 0.0


@compiled
def refresh(known: Counts) -> None:
    """Posterior means: each depth shrinks to the one before it, the first to the prior; each bin to its depth."""
    tried, accepted, hazards = known.tried, known.accepted, known.hazards
    for d in range(tried.shape[0]):
        mean, strength = PRIOR, PRIOR_TRIALS
        for k in range(tried.shape[1]):
            mean = (accepted[d, k, ANY] + strength * mean) / (tried[d, k, ANY] + strength)
            hazards[d, k, ANY] = mean
            strength = DEPTH_TRIALS
            for b in range(BINS):
                own = (accepted[d, k, b] + BIN_TRIALS * mean) / (tried[d, k, b] + BIN_TRIALS)
                hazards[d, k, b] = min(max(own, LEAST), MOST)
