"""Trees: how likely the later children of a node are, and what a wider beam finds.

A drafter's first child of a node is judged as a chain's is (`estimate`). The target takes another one only where it
does not take that: a later child has what its drafter says of it, given that the first one is wrong, times one factor
for its rank. So the children of a node never sum to more than 1, and a request whose first ones hold has less to expect
of the others.

Before there are nodes, a beam is weighed by places: how often the target's token is the w-th likeliest node of a depth,
given that it was in the beam at the depth before.

Shapes: D drafters, K depths, W places at a depth of the widest beam, M nodes, N requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import Bools, Floats, Ints
from outrider_runtime.control.data.forest import ROOT, Nodes

_EXPECTED, _TAKEN = 0, 1
"""Of a rank: what its drafter says, summed over its trials, and how often the target took it. Of a place: trials, and
the same."""
FACTOR_PRIOR, MOST_FACTOR, MOST_RANK_TRIALS = 4.0, 5.0, 100.0
"""Acceptances that a rank's factor of 1 counts for; its most; and the most expected acceptances that it rests on."""
PLACE_PRIOR, MOST_PLACE_TRIALS = 12.0, 400.0
LATER_SHARE = 0.35
"""Of what the places before leave, what the next one has before it was tried."""
LEAST_SAID, LEAST_DOUBT = 1e-4, 1e-9


class Beams(NamedTuple):
    """What the drafters' beams offer for the next step."""

    places: Floats
    """(D, K, W): how often the target's token is at each place of a depth, given that it was in the beam before."""
    hazards: Floats
    """(D, K): of chains."""
    widest: Ints
    """(D,); 1: chains only."""


@compiled
def beams(places: Floats, hazards: Floats, widest: Ints) -> Beams:
    """places: (D, K, W, 2), what was counted; hazards: (D, K), of chains."""
    drafters, depths, most = places.shape[:3]
    rates = np.ones((drafters, depths, most))
    for d in range(drafters if most > 1 else 0):
        rates[d] = _place_rates(places[d], hazards[d])
    return Beams(rates, hazards, widest)


@compiled
def _said(confidence: float) -> float:
    return float(1.0 / (1.0 + np.exp(-confidence)))


@compiled
def _above(nodes: Nodes, m: int) -> int:
    """Number of what a node follows, the requests' roots after all nodes."""
    parent = nodes.parent[m]
    return int(parent if parent != ROOT else len(nodes.parent) + nodes.request[m])


@compiled
def _later_chances(nodes: Nodes, requests: int) -> Floats:
    """(M,): of a drafter's later children, what it says of them, given that its first one is wrong; NaN for the first
    ones."""
    count, drafter = len(nodes.request), nodes.drafter
    said, doubt, whose = np.full(count, np.nan), np.full(count + requests, np.nan), np.full(count + requests, -1)
    for m in range(count):
        above, own = _above(nodes, m), _said(nodes.confidence[m])
        if whose[above] == drafter[m]:
            said[m] = min(1.0, own / max(doubt[above], LEAST_SAID))
        else:
            whose[above], doubt[above] = drafter[m], 1.0 - own
    return said


@compiled
def _factor(rank: Floats) -> float:
    return float(min((rank[_TAKEN] + FACTOR_PRIOR) / (rank[_EXPECTED] + FACTOR_PRIOR), MOST_FACTOR))


@compiled
def tree_paths(ranks: Floats, paths: Floats, nodes: Nodes, requests: int) -> Floats:
    """(M,) paths, from those (M,) of nodes that were each judged as a first child. ranks: (D, W, 2)"""
    said = _later_chances(nodes, requests)
    found = np.zeros(len(paths))
    missed = np.ones(len(paths) + requests)  # the target takes none of a node's children so far
    first_missed = np.ones(len(missed))
    for m in range(len(paths)):
        parent, above = nodes.parent[m], _above(nodes, m)
        as_first, before = (1.0, 1.0) if parent == ROOT else (paths[parent], found[parent])
        if paths[m] == 0.0:  # the request has no token left for it
            continue
        if np.isnan(said[m]):
            edge = min(paths[m] / as_first, missed[above])
            first_missed[above] = missed[above] - edge
        else:
            rank = ranks[nodes.drafter[m], min(nodes.rank[m], ranks.shape[1] - 1)]
            edge = min(said[m] * _factor(rank) * first_missed[above], missed[above])
        missed[above] -= edge
        found[m] = before * edge
    return found


@compiled
def count_trees(
    ranks: Floats, places: Floats, nodes: Nodes, verified: Bools, accepted: Bools, requests: int
) -> None:  # fmt: skip
    """A step's trees. ranks: (D, W, 2), places: (D, K, W, 2); verified, accepted: (M,), as `Outcome` has them."""
    _count_ranks(ranks, nodes, _later_chances(nodes, requests), verified, accepted, requests)
    _count_places(places, nodes, verified, accepted, requests)


@compiled
def _count_ranks(ranks: Floats, nodes: Nodes, said: Floats, verified: Bools, accepted: Bools, requests: int) -> None:
    """A later child is on trial where the target's token behind its parent is known, and is no first child."""
    taken = np.zeros(len(said) + requests, np.bool_)  # a first child is
    for m in range(len(said)):
        parent, above = nodes.parent[m], _above(nodes, m)
        known = parent == ROOT or (accepted[parent] and verified[parent])
        if np.isnan(said[m]):
            taken[above] |= accepted[m]
        elif known and not taken[above]:
            rank = ranks[nodes.drafter[m], min(nodes.rank[m], ranks.shape[1] - 1)]
            _count(rank, said[m], accepted[m], MOST_RANK_TRIALS)


@compiled
def _count_places(places: Floats, nodes: Nodes, verified: Bools, accepted: Bools, requests: int) -> None:
    """A depth of a beam is on trial where the target's way was in the beam at the depth before. Chains are none."""
    drafters, depths, widest = places.shape[:3]
    width = np.zeros((requests, drafters, depths), np.int64)
    took = np.full((requests, drafters, depths), -1)
    goes_on = np.zeros((requests, drafters, depths + 1), np.bool_)
    goes_on[:, :, 0] = True
    for m in range(len(nodes.request)):
        i, d, k = nodes.request[m], nodes.drafter[m], nodes.depth[m] - 1
        if k < depths:
            if accepted[m]:
                took[i, d, k], goes_on[i, d, k + 1] = width[i, d, k], verified[m]
            width[i, d, k] += 1
    for i in range(requests):
        for d in range(drafters):
            for k in range(depths if width[i, d].max() > 1 else 0):
                if goes_on[i, d, k]:
                    for w in range(min(width[i, d, k], widest)):
                        _count(places[d, k, w], 1.0, took[i, d, k] == w, MOST_PLACE_TRIALS)


@compiled
def _count(counts: Floats, expected: float, happened: bool, most: float) -> None:
    counts *= min(1.0, most / (counts[_EXPECTED] + expected))
    counts[_EXPECTED] += expected
    counts[_TAKEN] += happened


@compiled
def _place_rates(places: Floats, hazards: Floats) -> Floats:
    depths, widest = places.shape[:2]
    rates = np.zeros((depths, widest))
    for k in range(depths):
        left = 1.0
        for w in range(widest):
            if k == 0:
                prior = hazards[0] if w == 0 else LATER_SHARE * left
            else:  # as at the depth before, and as a chain's odds fall from there
                prior = rates[k - 1, w] * (min(1.0, hazards[k] / hazards[k - 1]) if w == 0 else 1.0)
            rate = (places[k, w, _TAKEN] + PLACE_PRIOR * prior) / (places[k, w, _EXPECTED] + PLACE_PRIOR)
            rates[k, w] = min(rate, left)
            left -= rates[k, w]
    return rates


@compiled
def place_rates(chains: Floats, places: Floats, hazards: Floats) -> Floats:
    """(K, W, N): how likely the target's token is at each place of a request's beam, given that it was in the beam
    before. A request differs from the others as its chains (K, N) do; 0 where it has no room."""
    depths, requests = chains.shape
    rates = np.zeros((depths, places.shape[1], requests))
    for i in range(requests):
        factor = chains[0, i] / (1.0 - chains[0, i]) * (1.0 - hazards[0]) / hazards[0]
        for k in range(depths):
            if chains[k, i] <= 0.0:
                break
            doubt = max(LEAST_DOUBT, 1.0 - places[k, 0])
            odds = places[k, 0] / doubt * factor
            rates[k, 0, i] = odds / (1.0 + odds)
            for w in range(1, places.shape[1]):
                rates[k, w, i] = places[k, w] / doubt * (1.0 - rates[k, 0, i])
    return rates


@compiled
def most_gained(paths: Floats, beams: Beams) -> Floats:
    """(N,): the most tokens beyond the bonus token that any drafter is expected to bring if it has a proposal. paths:
    (D, K, N)."""
    drafters, depths, requests = paths.shape
    most = np.zeros(requests)
    for d in range(drafters):
        widest = beams.widest[d]
        rates = place_rates(paths[d], beams.places[d], beams.hazards[d]) if widest > 1 else paths[:0]
        for i in range(requests):
            gain, beam, reach = paths[d, :, i].sum(), 0.0, 1.0
            for k in range(depths if widest > 1 else 0):
                reach *= rates[k, :widest, i].sum()
                beam += reach
            most[i] = max(most[i], gain, beam)
    return most
