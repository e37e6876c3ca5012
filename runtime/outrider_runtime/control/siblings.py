"""Trees: how likely the later children of a node are, and what a wider beam finds.

A drafter's first child of a node is judged as a chain's is (`acceptance`). The target takes another one only where it
does not take that: a later child has what its drafter says of it, given that the first one is wrong, times one factor
for its rank. So the children of a node never sum to more than 1, and a request whose first ones hold has less to expect
of the others.

Before there are nodes, a beam is weighed by places: how often the target's token is the w-th likeliest node of a depth,
given that it was in the beam at the depth before.

Shapes: D drafters, K depths, W places at a depth, M nodes, N requests.
"""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.batch import Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.forest import ROOT, Forest

EXPECTED, TAKEN = 0, 1
"""Of a rank: what its drafter says, summed over its trials, and how often the target took it. Of a place: trials, and
the same."""
FACTOR_PRIOR, MOST_FACTOR, MOST_RANK_TRIALS = 4.0, 5.0, 100.0
"""Acceptances that a rank's factor of 1 counts for; its most; and the most expected acceptances that it rests on."""
PLACE_PRIOR, MOST_PLACE_TRIALS = 12.0, 400.0
LATER_SHARE = 0.35
"""Of what the places before leave, what the next one has before it was tried."""
LEAST_SAID = 1e-4


class Siblings:
    """Discounted counts. W: nodes at a depth of the widest beam in the pool."""

    def __init__(self, drafters: int, depths: int, widest: int) -> None:
        self._ranks = np.zeros((drafters, max(1, widest), 2))
        self._places = np.zeros((drafters, depths, widest, 2))

    def age(self, keep: float) -> None:
        self._ranks *= keep
        self._places *= keep

    def observe(self, forest: Forest, verified: Bools, accepted: Bools, requests: int) -> None:
        """verified, accepted: (M,), as `Outcome` has them."""
        request, parent, drafter = forest.request, forest.parent, forest.drafter
        said = _later_chances(request, parent, drafter, forest.confidence, requests)
        _count_ranks(self._ranks, request, parent, drafter, forest.rank, said, verified, accepted, requests)
        _count_places(self._places, request, drafter, forest.depth, verified, accepted, requests)

    def paths(self, forest: Forest, paths: Floats, requests: int) -> Floats:
        """(M,) paths, from those (M,) of nodes that were each judged as a first child."""
        said = _later_chances(forest.request, forest.parent, forest.drafter, forest.confidence, requests)
        return _paths(self._ranks, paths, forest.request, forest.parent, forest.drafter, forest.rank, said, requests)

    def places(self, drafter: int, hazards: Floats) -> Floats:
        """(K, W): how often the target's token is at each place. hazards: (K,), of a chain by the same drafter."""
        return _place_rates(self._places[drafter], hazards)


@compiled
def _said(confidence: float) -> float:
    return float(1.0 / (1.0 + np.exp(-confidence)))


@compiled
def _later_chances(request: Ints, parent: Ints, drafter: Ints, confidence: Floats, requests: int) -> Floats:
    """(M,): of a drafter's later children, what it says of them, given that its first one is wrong; NaN for the first
    ones. A node's parent ROOT is its request's."""
    said, doubt = np.full(len(request), np.nan), np.full(len(request) + requests, np.nan)
    whose = np.full(len(doubt), -1)
    for m in range(len(request)):
        above = parent[m] if parent[m] != ROOT else len(request) + request[m]
        own = _said(confidence[m])
        if whose[above] == drafter[m]:
            said[m] = min(1.0, own / max(doubt[above], LEAST_SAID))
        else:
            whose[above], doubt[above] = drafter[m], 1.0 - own
    return said


@compiled
def _factor(rank: Floats) -> float:
    return float(min((rank[TAKEN] + FACTOR_PRIOR) / (rank[EXPECTED] + FACTOR_PRIOR), MOST_FACTOR))


@compiled
def _paths(
    ranks: Floats, paths: Floats, request: Ints, parent: Ints, drafter: Ints, rank: Ints, said: Floats, requests: int
) -> Floats:  # fmt: skip
    found = np.zeros(len(paths))
    missed = np.ones(len(paths) + requests)  # the target takes none of a node's children so far
    first_missed = np.ones(len(missed))
    for m in range(len(paths)):
        root = parent[m] == ROOT
        above = len(paths) + request[m] if root else parent[m]
        as_first, before = (1.0, 1.0) if root else (paths[parent[m]], found[parent[m]])
        if paths[m] == 0.0:  # the request has no token left for it
            continue
        if np.isnan(said[m]):
            edge = min(paths[m] / as_first, missed[above])
            first_missed[above] = missed[above] - edge
        else:
            edge = said[m] * _factor(ranks[drafter[m], min(rank[m], ranks.shape[1] - 1)]) * first_missed[above]
            edge = min(edge, missed[above])
        missed[above] -= edge
        found[m] = before * edge
    return found


@compiled
def _count_ranks(
    ranks: Floats, request: Ints, parent: Ints, drafter: Ints, rank: Ints, said: Floats, verified: Bools,
    accepted: Bools, requests: int,
) -> None:  # fmt: skip
    """A later child is on trial where the target's token behind its parent is known, and is no first child."""
    taken = np.zeros(len(said) + requests, np.bool_)  # a first child is
    for m in range(len(said)):
        root = parent[m] == ROOT
        above = len(said) + request[m] if root else parent[m]
        known = root or (accepted[parent[m]] and verified[parent[m]])
        if np.isnan(said[m]):
            taken[above] |= accepted[m]
        elif known and not taken[above]:
            counts = ranks[drafter[m], min(rank[m], ranks.shape[1] - 1)]
            _count(counts, said[m], accepted[m], MOST_RANK_TRIALS)


@compiled
def _count_places(
    places: Floats, request: Ints, drafter: Ints, depth: Ints, verified: Bools, accepted: Bools, requests: int
) -> None:  # fmt: skip
    """A depth of a beam is on trial where the target's way was in the beam at the depth before. Chains are none."""
    drafters, depths, widest = places.shape[:3]
    nodes = np.zeros((requests, drafters, depths), np.int64)
    took = np.full((requests, drafters, depths), -1)
    goes_on = np.zeros((requests, drafters, depths + 1), np.bool_)
    goes_on[:, :, 0] = True
    for m in range(len(request)):
        i, d, k = request[m], drafter[m], depth[m] - 1
        if k < depths:
            if accepted[m]:
                took[i, d, k], goes_on[i, d, k + 1] = nodes[i, d, k], verified[m]
            nodes[i, d, k] += 1
    for i in range(requests):
        for d in range(drafters):
            for k in range(depths if nodes[i, d].max() > 1 else 0):
                if goes_on[i, d, k]:
                    for w in range(min(nodes[i, d, k], widest)):
                        _count(places[d, k, w], 1.0, took[i, d, k] == w, MOST_PLACE_TRIALS)


@compiled
def _count(counts: Floats, expected: float, happened: bool, most: float) -> None:
    counts *= min(1.0, most / (counts[EXPECTED] + expected))
    counts[EXPECTED] += expected
    counts[TAKEN] += happened


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
            rate = (places[k, w, TAKEN] + PLACE_PRIOR * prior) / (places[k, w, EXPECTED] + PLACE_PRIOR)
            rates[k, w] = min(rate, left)
            left -= rates[k, w]
    return rates
