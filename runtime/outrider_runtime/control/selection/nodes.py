"""The selection of the nodes that the target scores: one for chains and trees, one drafter or several.

Nodes are ranked by path probability (of a node and all nodes above it) less what the node costs beyond the target's
price of a token. A child's path is never likelier than its parent's, so every prefix of the ranking is a set of
subtrees. The plan is the prefix of the highest worth under the cost with its knee. No other set of as many nodes gains
more (AdaServe lemma A.2), so it is the best of all plans. M nodes, N requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import Bools, Floats, Ints
from outrider_runtime.control.value import Price, worth


class Selection(NamedTuple):
    """A plan and its worth: expected tokens beyond the bonus tokens, less lambda times the step's seconds."""

    nodes: Bools
    """(M,)"""
    value: float


@compiled
def select(
    paths: Floats, request: Ints, depth: Ints, price: Price, budget: int, forced: Bools, longest_s: float
) -> Selection:
    """The best set of nodes for the target to score. The empty set is always a candidate, unless some nodes are forced.

    paths: (M,), probability that a node and all nodes above it are accepted. request, depth: (M,). budget: most
    proposals that the step may hold. forced: (M,), subtrees that are scored whatever they are worth; they fit into the
    budget. longest_s: most seconds of the target's pass, unless the forced nodes alone take longer.
    """
    scores = np.empty(len(paths))
    for m in range(len(paths)):
        scores[m] = paths[m] - price.rate * price.node_s[request[m]]
    taken, gain, candidates = _candidates(scores, forced, price)
    longest_s = max(longest_s, price.varlen_s[taken])
    length, even = _best_length(_Scored(scores, paths, request, depth, forced), price, budget, longest_s)
    ranked = -np.sort(-candidates)[: max(0, min(budget, len(price.varlen_s) - 1) - taken)]
    count, varlen = _best_count(ranked, gain, taken, price, longest_s)
    if even >= varlen:  # at equal worth the uniform plan: if the estimate is wrong, its graph loses less
        return Selection(depth <= length, even)
    nodes = forced.copy()
    if count:
        _take(scores, nodes, ranked[count - 1], count)
    return Selection(nodes, varlen)


@compiled
def _candidates(scores: Floats, forced: Bools, price: Price) -> tuple[int, float, Floats]:
    """Number of forced nodes, their gain, and the scores of the other nodes that may pay for the cheapest token."""
    seconds, rate, least_s = price.varlen_s, price.rate, np.inf
    for more in range(1, len(seconds)):
        least_s = min(least_s, seconds[more] - seconds[more - 1])
    taken, gain, kept, count = 0, 0.0, np.empty(len(scores)), 0
    for m in range(len(scores)):
        if forced[m]:
            taken += 1
            gain += scores[m]
        elif scores[m] > rate * max(0.0, least_s):
            kept[count] = scores[m]
            count += 1
    return taken, gain, kept[:count]


@compiled
def _best_count(ranked: Floats, gain: float, taken: int, price: Price, longest_s: float) -> tuple[int, float]:
    """How many of the ranked scores to add to the `taken` forced nodes, and the worth of all."""
    seconds, rate = price.varlen_s, price.rate
    best, value = 0, worth(gain, seconds[taken], rate)
    for count in range(1, len(ranked) + 1):
        gain += ranked[count - 1]
        value_so_far = worth(gain, seconds[taken + count], rate)
        if value_so_far > value and seconds[taken + count] <= longest_s:
            best, value = count, value_so_far
    return best, value


@compiled
def _take(scores: Floats, nodes: Bools, least: float, count: int) -> None:
    """Mark the `count` highest scores, the lowest of which is `least`. Equal scores go by position: parents first."""
    for m in range(len(scores)):
        if scores[m] > least and not nodes[m]:
            nodes[m] = True
            count -= 1
    for m in range(len(scores)):
        if count and scores[m] == least and not nodes[m]:
            nodes[m] = True
            count -= 1


class _Scored(NamedTuple):
    """Columns over nodes (M,): see `select`."""

    scores: Floats
    """Path less the node's cost, in tokens, beyond the target's price of a token."""
    paths: Floats
    request: Ints
    depth: Ints
    forced: Bools


@compiled
def _best_length(proposed: _Scored, price: Price, budget: int, longest_s: float) -> tuple[int, float]:
    """The best k for a uniform step, k = 0 included, and its worth: all requests must have chains of that length, and
    tokens left for them. Worth -inf if no such plan contains the forced nodes."""
    seconds, rate, requests = price.uniform_s, price.rate, len(price.node_s)
    scores, paths, request, depth, forced = proposed
    deepest, least = 0, 0
    for m in range(len(depth)):
        deepest = max(deepest, depth[m])
        if forced[m]:
            least = max(least, depth[m])
    gains = np.zeros(deepest + 1)
    of_request = np.zeros((deepest + 1, requests), np.int64)
    for m in range(len(depth)):
        of_request[depth[m], request[m]] += paths[m] > 0.0
        gains[depth[m]] += scores[m]
    best, value, gain = 0, -np.inf, 0.0
    if least == 0:
        value = worth(0.0, seconds[0], rate)
    for k in range(1, deepest + 1):
        gain += gains[k]
        tokens = k * requests
        if tokens > budget or tokens >= len(seconds) or of_request[k].max() > 1 or of_request[k].min() == 0:
            break
        value_so_far = worth(gain, seconds[tokens], rate)
        if k >= least and value_so_far > value and seconds[tokens] <= longest_s:
            best, value = k, value_so_far
    return best, value
