"""What trials teach: discounted counts by depth and bin, and for the groups that a request is of.

A group's factor multiplies odds, so nothing passes 1, and is shrunk to 1. All that is counted is kept in place.
Shapes: D drafters, K depths, B bins, G groups: no class, classes, slots; N requests, M nodes.
"""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.batch import NOBODY, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled

BINS = 8
ANY = BINS
"""Column of all bins together: what is known before there is a confidence."""
PRIOR, PRIOR_TRIALS = 0.6, 4.0
DEPTH_TRIALS = 12.0
"""What the depth before it counts for in a depth's estimate: few requests reach deep positions, the easy ones first."""
BIN_TRIALS = 6.0
CLASS_TRIALS, SLOT_TRIALS = 30.0, 6.0
MOST_TRIALS, MOST_SLOT_TRIALS = 150.0, 60.0
"""Most trials an estimate rests on, so that it follows the traffic."""
RECENT_TRIALS, ALARM_SIGMAS = 24.0, 3.5
MET_TRIALS, MET_ASKED = 12.0, 24.0
"""Tried, or asked, so often, a drafter is no stranger."""
HIT_TRIALS, SLOT_HIT_TRIALS, MOST_SLOT_HITS = 2.0, 3.0, 20.0
LEAST, MOST = 0.01, 0.99
TRIED, ACCEPTED, EXPECTED, EXPECTED_ANY, EVERY = range(5)
"""Of a group: trials, acceptances, and the acceptances that the pool's estimate expects, with and without regard to
confidence, all four of the last trials only; and all trials."""


@compiled
def bin_of(confidence: float, edges: Floats) -> int:
    """The column of a confidence; edges: (B-1,) of its drafter."""
    return ANY if np.isnan(confidence) else int(np.searchsorted(edges, confidence))


@compiled
def with_factor(chance: float, factor: float) -> float:
    """A probability with its odds multiplied."""
    odds = chance / (1.0 - chance) * factor
    return float(min(odds / (1.0 + odds), MOST))


@compiled
def pool_tried(groups: Floats, classes: int) -> float:
    """All trials: each is of a class, or of none. groups: (G, 5) of a drafter"""
    total = 0.0
    for row in range(1 + classes):
        total += groups[row, EVERY]
    return total


@compiled
def weight_of(pool: float, group: Floats, strength: float) -> float:
    """How much a group's own acceptances count against what the pool expects of it. Its share of the pool is evidence
    that has counted already: its mean is shrunk to that of the others, and of a lone request's nothing is left."""
    if group[TRIED] <= 0.0:
        return 0.0
    share = min(0.999, group[EVERY] / max(pool, 1e-9))
    return float(max(0.0, group[TRIED] - strength * share / (1.0 - share)) / (group[TRIED] + strength))


@compiled
def ratio(group: Floats, weight: float, column: int) -> float:
    """By what the odds of a group differ from what the pool expects, EXPECTED or EXPECTED_ANY."""
    if weight <= 0.0:
        return 1.0
    mean = min(max(group[column] / group[TRIED], LEAST), MOST)
    own = min(max(mean + weight * (group[ACCEPTED] / group[TRIED] - mean), LEAST), MOST)
    return float(own * (1.0 - mean) / ((1.0 - own) * mean))


@compiled
def class_factors(pool: float, groups: Floats, classes: int, column: int) -> Floats:
    """(1 + classes,): the factors that requests of a class have in common, the first one those of none. groups: (G, 5)
    of a drafter."""
    factors = np.empty(1 + classes)
    for row in range(1 + classes):
        factors[row] = ratio(groups[row], weight_of(pool, groups[row], CLASS_TRIALS), column)
    return factors


@compiled
def factor_of(of_class: Floats, pool: float, groups: Floats, slo_class: int, slot: int, column: int) -> float:
    """The product of both factors on a request's odds. of_class: as `class_factors` has them."""
    own = groups[len(of_class) + slot]
    in_common = of_class[min(slo_class, len(of_class) - 2) + 1]
    return float(in_common * ratio(own, weight_of(pool, own, SLOT_TRIALS), column))


@compiled
def observe(
    asked_of: Ints, lengths: Ints, request: Ints, drafter: Ints, depth: Ints, confidence: Floats, trials: Bools,
    accepted: Bools, classes: int, slot: Ints, slo_class: Ints, edges: Floats, asked: Floats, offered: Floats,
    slot_hits: Floats, tried: Floats, successes: Floats, hazards: Floats, groups: Floats, recent: Floats, met: Bools,
) -> int:  # fmt: skip
    """Returns how many drafters' last trials contradict their estimates."""
    _count_hits(asked_of, lengths, request, drafter, depth, slot, asked, offered, slot_hits)
    bins = np.empty(len(request), np.int64)
    for m in range(len(request)):
        bins[m] = bin_of(confidence[m], edges[drafter[m]])
    alarms = _count_trials(trials, drafter, depth, bins, accepted, tried, successes, hazards, groups, recent)
    for m in np.flatnonzero(trials):
        d, i, chances = drafter[m], request[m], hazards[drafter[m], min(depth[m], hazards.shape[1]) - 1]
        rows = (min(slo_class[i], classes - 1) + 1, classes + 1 + slot[i])
        _count_for_groups(groups[d], pool_tried(groups[d], classes), rows, chances[bins[m]], chances[ANY], accepted[m])
    for d in range(len(met)):
        met[d] |= tried[d, 0, ANY] >= MET_TRIALS or asked[d, 0] >= MET_ASKED
    return alarms


@compiled
def _count_hits(
    asked_of: Ints, lengths: Ints, request: Ints, drafter: Ints, depth: Ints, slot: Ints,
    asked: Floats, offered: Floats, slot_hits: Floats,
) -> None:  # fmt: skip
    deepest = np.zeros((asked.shape[0], len(slot)), np.int64)
    for m in range(len(request)):
        deepest[drafter[m], request[m]] = max(deepest[drafter[m], request[m]], depth[m])
    for i in range(len(slot)):
        for rank in range(asked_of.shape[0]):
            d = asked_of[rank, i]
            if d == NOBODY:
                break
            found = min(deepest[d, i], asked.shape[1])
            asked[d, : min(max(lengths[d], found), asked.shape[1])] += 1.0
            offered[d, :found] += 1.0
            own = slot_hits[slot[i], d]
            own *= min(1.0, MOST_SLOT_HITS / (own[0] + 1.0))
            own[0] += 1.0
            own[1] += found > 0
            if found > 0:
                break
    for d in range(asked.shape[0]):
        for k in range(asked.shape[1]):
            keep = min(1.0, MOST_TRIALS / max(asked[d, k], 1e-9))
            asked[d, k] *= keep
            offered[d, k] *= keep


@compiled
def _count_trials(
    trials: Bools, drafter: Ints, depth: Ints, bins: Ints, accepted: Bools,
    tried: Floats, successes: Floats, hazards: Floats, groups: Floats, recent: Floats,
) -> int:  # fmt: skip
    """Count for depths and bins. Returns how many drafters' last trials contradict their estimates."""
    for m in np.flatnonzero(trials):
        d, k = drafter[m], min(depth[m], hazards.shape[1]) - 1
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
            _start_anew(tried[d], successes[d], hazards[d], groups[d], recent[d])
            alarms += 1
    refresh(tried, successes, hazards)
    return alarms


@compiled
def _count_for_groups(
    groups: Floats, pool: float, rows: tuple[int, int], binned: float, blind: float, accepted: bool
) -> None:  # fmt: skip
    """Of one trial; the slot's factor explains what the class's leaves. groups: (G, 5) of its drafter; rows: its class,
    its slot; binned, blind: what the pool expects with and without its confidence."""
    for j in range(2):
        group, strength = groups[rows[j]], (CLASS_TRIALS, SLOT_TRIALS)[j]
        group[:EVERY] *= min(1.0, (MOST_TRIALS, MOST_SLOT_TRIALS)[j] / (group[TRIED] + 1.0))
        weight = weight_of(pool, group, strength)
        by_bin, by_any = ratio(group, weight, EXPECTED), ratio(group, weight, EXPECTED_ANY)
        group[TRIED] += 1.0
        group[ACCEPTED] += accepted
        group[EXPECTED] += binned
        group[EXPECTED_ANY] += blind
        group[EVERY] += 1.0
        binned, blind = with_factor(binned, by_bin), with_factor(blind, by_any)


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
def _start_anew(tried: Floats, successes: Floats, hazards: Floats, groups: Floats, recent: Floats) -> None:
    """The last trials become what is known, and it counts for little. All arrays are one drafter's."""
    ratio = recent[0] / max(recent[1], 1e-9)
    for k in range(tried.shape[0]):
        for b in range(tried.shape[1]):
            tried[k, b] = min(tried[k, b], RECENT_TRIALS / 2)
            successes[k, b] = min(max(hazards[k, b] * ratio, LEAST), MOST) * tried[k, b]
    groups[:] = 0.0
    recent[:] = 0.0


@compiled
def refresh(tried: Floats, successes: Floats, hazards: Floats) -> None:
    """Posterior means: each depth shrinks to the one before it, the first to the prior; each bin to its depth."""
    for d in range(tried.shape[0]):
        mean, strength = PRIOR, PRIOR_TRIALS
        for k in range(tried.shape[1]):
            mean = (successes[d, k, ANY] + strength * mean) / (tried[d, k, ANY] + strength)
            hazards[d, k, ANY] = mean
            strength = DEPTH_TRIALS
            for b in range(BINS):
                own = (successes[d, k, b] + BIN_TRIALS * mean) / (tried[d, k, b] + BIN_TRIALS)
                hazards[d, k, b] = min(max(own, LEAST), MOST)
