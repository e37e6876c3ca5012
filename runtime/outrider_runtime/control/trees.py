"""Trees: acceptance rates of a node's later children, and of the nodes of a beam.

A drafter's first child of a node is judged like a token of a chain (`acceptance`). The target accepts a later child
only if it rejects the first one. So a later child's probability is its drafter's own probability for it, given that the
first child is wrong, times a factor for its rank. The probabilities of a node's children thus never sum to more than 1,
and the likelier a request's first children are, the less likely are its later ones.

Before nodes are proposed, a beam is judged by places: how often the target's token is the w-th likeliest node of a
depth, given that it was in the beam at the depth before.

Shapes: D drafters, K depths, W places at a depth of the widest beam, M nodes, N requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.plans import ROOT, Nodes

_EXPECTED, _ACCEPTED = 0, 1
"""Columns of the counts of a rank or a place: the acceptances that the drafter's own probabilities expect (for a place:
trials), and acceptances."""
FACTOR_PRIOR, MOST_FACTOR, MOST_RANK_TRIALS = 4.0, 5.0, 100.0
"""Expected acceptances that a factor of 1 counts for; largest factor; most expected acceptances that a factor rests
on."""
PLACE_PRIOR, MOST_PLACE_TRIALS = 12.0, 400.0
"""Trials that a place's prior counts for; most trials that its rate rests on."""
LATER_SHARE = 0.35
"""Prior rate of a place / the probability that the places before it leave over."""
LEAST_SAID, LEAST_DOUBT = 1e-4, 1e-9
"""Least 1 - P(first child) and 1 - P(first place) that other probabilities are divided by."""


class Beams(NamedTuple):
    """Acceptance rates of the drafters' beams in the next step."""

    places: Floats
    """(D, K, W): P(the target's token is at a place of a depth | it was in the beam at the depth before)."""
    chain_rates: Floats
    """(D, K): acceptance rates of chains."""
    widest: Ints
    """(D,): most nodes at a depth; 1: chains only."""


@compiled
def beams(places: Floats, chain_rates: Floats, widest: Ints) -> Beams:
    """The rates from the counts of places (D, K, W, 2). chain_rates: (D, K), acceptance rates of chains."""
    drafters, depths, most = places.shape[:3]
    rates = np.ones((drafters, depths, most))
    for d in range(drafters if most > 1 else 0):
        rates[d] = _place_rates(places[d], chain_rates[d])
    return Beams(rates, chain_rates, widest)


@compiled
def _own_probability(confidence: float) -> float:
    return float(1.0 / (1.0 + np.exp(-confidence)))


@compiled
def _above(nodes: Nodes, m: int) -> int:
    """Number of a node's parent; a request's root is numbered `M + request`."""
    parent = nodes.parent[m]
    return int(parent if parent != ROOT else len(nodes.parent) + nodes.request[m])


@compiled
def _later_chances(nodes: Nodes, requests: int) -> Floats:
    """(M,): the drafter's own P(a later child is right | the first child is wrong); NaN for first children."""
    count, drafter = len(nodes.request), nodes.drafter
    said, doubt, whose = np.full(count, np.nan), np.full(count + requests, np.nan), np.full(count + requests, -1)
    for m in range(count):
        above, own = _above(nodes, m), _own_probability(nodes.confidence[m])
        if whose[above] == drafter[m]:
            said[m] = min(1.0, own / max(doubt[above], LEAST_SAID))
        else:
            whose[above], doubt[above] = drafter[m], 1.0 - own
    return said


@compiled
def _factor(rank: Floats) -> float:
    return float(min((rank[_ACCEPTED] + FACTOR_PRIOR) / (rank[_EXPECTED] + FACTOR_PRIOR), MOST_FACTOR))


@compiled
def tree_paths(ranks: Floats, paths: Floats, nodes: Nodes, requests: int) -> Floats:
    """(M,): path probabilities, from `paths` (M,), where every node is judged as a first child. ranks: (D, W, 2)"""
    said = _later_chances(nodes, requests)
    tree = np.zeros(len(paths))
    missed = np.ones(len(paths) + requests)  # P(the target accepts none of a node's children so far)
    first_missed = np.ones(len(missed))
    for m in range(len(paths)):
        parent, above = nodes.parent[m], _above(nodes, m)
        as_first, before = (1.0, 1.0) if parent == ROOT else (paths[parent], tree[parent])
        if paths[m] == 0.0:  # the request may not produce a token for it
            continue
        if np.isnan(said[m]):
            edge = min(paths[m] / as_first, missed[above])
            first_missed[above] = missed[above] - edge
        else:
            rank = ranks[nodes.drafter[m], min(nodes.rank[m], ranks.shape[1] - 1)]
            edge = min(said[m] * _factor(rank) * first_missed[above], missed[above])
        missed[above] -= edge
        tree[m] = before * edge
    return tree


@compiled
def count_trees(
    ranks: Floats, places: Floats, nodes: Nodes, verified: Bools, accepted: Bools, requests: int
) -> None:  # fmt: skip
    """Count a step's trees. ranks: (D, W, 2), places: (D, K, W, 2). verified, accepted: (M,), see `Outcome`."""
    _count_ranks(ranks, nodes, _later_chances(nodes, requests), verified, accepted, requests)
    _count_places(places, nodes, verified, accepted, requests)


@compiled
def _count_ranks(ranks: Floats, nodes: Nodes, said: Floats, verified: Bools, accepted: Bools, requests: int) -> None:
    """Count trials of later children: the target's token after the parent is known and is not the first child."""
    taken = np.zeros(len(said) + requests, np.bool_)  # the first child is accepted
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
    """Count trials of places: the target's tokens were in the beam at the depth before. Chains are not counted."""
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
    counts[_ACCEPTED] += happened


@compiled
def _place_rates(places: Floats, chain_rates: Floats) -> Floats:
    depths, widest = places.shape[:2]
    rates = np.zeros((depths, widest))
    for k in range(depths):
        left = 1.0
        for w in range(widest):
            if k == 0:
                prior = chain_rates[0] if w == 0 else LATER_SHARE * left
            else:  # the rate at the depth before, falling as a chain's rate does
                prior = rates[k - 1, w] * (min(1.0, chain_rates[k] / chain_rates[k - 1]) if w == 0 else 1.0)
            rate = (places[k, w, _ACCEPTED] + PLACE_PRIOR * prior) / (places[k, w, _EXPECTED] + PLACE_PRIOR)
            rates[k, w] = min(rate, left)
            left -= rates[k, w]
    return rates


@compiled
def place_rates(chains: Floats, places: Floats, chain_rates: Floats) -> Floats:
    """(K, W, N): P(the target's token is at a place of a request's beam | it was in the beam at the depth before).

    A request's beam differs from the mean as its chains (K, N) do; 0 past the tokens that it may still produce.
    """
    depths, requests = chains.shape
    rates = np.zeros((depths, places.shape[1], requests))
    for i in range(requests):
        factor = chains[0, i] / (1.0 - chains[0, i]) * (1.0 - chain_rates[0]) / chain_rates[0]
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
    """(N,): the most accepted tokens that any drafter is expected to bring if it has a proposal. paths: (D, K, N)."""
    drafters, depths, requests = paths.shape
    most = np.zeros(requests)
    for d in range(drafters):
        widest = beams.widest[d]
        rates = place_rates(paths[d], beams.places[d], beams.chain_rates[d]) if widest > 1 else paths[:0]
        for i in range(requests):
            gain, beam, reach = paths[d, :, i].sum(), 0.0, 1.0
            for k in range(depths if widest > 1 else 0):
                reach *= rates[k, :widest, i].sum()
                beam += reach
            most[i] = max(most[i], gain, beam)
    return most
