"""One selection of what the target scores, for chains and trees, one drafter or several.

Nodes are ranked by path probability less what their token costs beyond the target's price. As a path never gains,
every prefix of the ranking is a set of subtrees, and the prefix of the highest worth under the bent cost is the plan.
No set of so many nodes gains more (AdaServe lemma A.2), so it is the best of all plans. M nodes, N requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.batch import Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.forest import Forest
from outrider_runtime.control.value import Price, worth


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A plan and its worth: expected tokens beyond the bonus ones, less lambda times the step's seconds."""

    nodes: Bools
    """(M,)"""
    value: float


def select(
    paths: Floats, request: Ints, depth: Ints, price: Price, budget: int,
    *, forced: Bools | None = None, longest_s: float = math.inf, varlen: bool = True,
) -> Selection:  # fmt: skip
    """The best set of nodes for the target to score; none of them is always among the candidates unless `forced`.

    paths: (M,), probability that a node and all that it hangs on is accepted. request, depth: (M,). budget: most
    proposals that the step may hold. forced: (M,), subtrees that are scored whatever they are worth; they fit into the
    budget. longest_s: what is added to them must not make the target's pass longer. varlen: whether another length for
    each request is possible at all.
    """
    first = np.zeros(len(paths), dtype=bool) if forced is None else forced
    scores = paths - price.rate * price.node_s[request]
    best = _best_uniform(scores, request, depth, first, price, budget, longest_s, varlen)
    if varlen:
        ragged = _best_prefix(scores, first, price, budget, longest_s)
        # Equal worth: the uniform plan, whose graph is the cheaper one to be wrong about.
        best = ragged if ragged.value > best.value else best
    return best


def _best_prefix(scores: Floats, forced: Bools, price: Price, budget: int, longest_s: float) -> Selection:
    taken, gain, candidates = _candidates(scores, forced, price.ragged_s, price.rate)
    most = max(0, min(budget, len(price.ragged_s) - 1) - taken)
    ranked = -np.sort(-candidates)[:most]
    count, value = _best_count(ranked, gain, taken, price.ragged_s, price.rate, longest_s)
    nodes = forced.copy()
    if count:
        _take(scores, nodes, ranked[count - 1], count)
    return Selection(nodes, value)


@compiled
def _candidates(scores: Floats, forced: Bools, seconds: Floats, rate: float) -> tuple[int, float, Floats]:
    """Nodes forced, what they gain, and the scores of the others that may be worth the least that a token costs."""
    least_s = np.inf
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
def _best_count(
    ranked: Floats, gain: float, taken: int, seconds: Floats, rate: float, longest_s: float
) -> tuple[int, float]:
    """How many of the ranked scores to take beside what is taken, and what all is worth."""
    best, value = 0, worth(gain, seconds[taken], rate)
    for count in range(1, len(ranked) + 1):
        gain += ranked[count - 1]
        here = worth(gain, seconds[taken + count], rate)
        if here > value and seconds[taken + count] <= longest_s:
            best, value = count, here
    return best, value


@compiled
def _take(scores: Floats, nodes: Bools, least: float, count: int) -> None:
    """Mark the `count` highest scores, the lowest of them `least`. Of equal ones the first, so parents go first."""
    for m in range(len(scores)):
        if scores[m] > least and not nodes[m]:
            nodes[m] = True
            count -= 1
    for m in range(len(scores)):
        if count and scores[m] == least and not nodes[m]:
            nodes[m] = True
            count -= 1


def _best_uniform(
    scores: Floats, request: Ints, depth: Ints, forced: Bools, price: Price, budget: int, longest_s: float, varlen: bool
) -> Selection:  # fmt: skip
    """The same k for every request; k = 0 among them. Where lengths may vary only if all have chains as long, else an
    engine pads. Worth -inf where no such plan holds what is forced."""
    least = int(depth[forced].max(initial=0))
    seconds = price.uniform_s if varlen or math.isfinite(price.uniform_s[-1]) else price.ragged_s
    length, value = _best_length(
        scores, request, depth, least, budget, seconds, price.rate, longest_s, len(price.node_s), not varlen
    )
    return Selection(depth <= length, value)


@compiled
def _best_length(
    scores: Floats, request: Ints, depth: Ints, least: int, budget: int, seconds: Floats, rate: float,
    longest_s: float, requests: int, pads: bool,
) -> tuple[int, float]:  # fmt: skip
    deepest = 0
    for m in range(len(depth)):
        deepest = max(deepest, depth[m])
    gains = np.zeros(deepest + 1)
    of_request = np.zeros((deepest + 1, requests), np.int64)
    for m in range(len(depth)):
        of_request[depth[m], request[m]] += 1
        gains[depth[m]] += scores[m]
    best, value, gain = 0, -np.inf, 0.0
    if least == 0:
        value = worth(0.0, seconds[0], rate)
    for k in range(1, deepest + 1):
        gain += gains[k]
        tokens = k * requests
        if tokens > budget or tokens >= len(seconds) or of_request[k].max() > 1:
            break
        if not pads and of_request[k].min() == 0:
            break
        here = worth(gain, seconds[tokens], rate)
        if k >= least and here > value and (k == least or seconds[tokens] <= longest_s):
            best, value = k, here
    return best, value


def everything(forest: Forest, left: Ints, budget: int) -> Bools:
    """(M,): as many nodes as fit, from the first request on, where goodput has no say. left: (N,), see `Batch`."""
    nodes = np.asarray(forest.depth < left[forest.request])
    nodes[np.cumsum(nodes) > budget] = False
    return nodes
