"""Choice of lengths: TurboSpec's ArgMaxGoodput, generalised to one length per request.

Maximise `E[tokens] - lambda * T_step`. Of all sets of positions (request i, position j) of one size the best holds
the highest products of hazards, and as a product falls with j it never skips a position of a chain. So one
ranking is enough: the best set of any size is a prefix of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.costs import StepCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TargetPrice:
    """What the target's pass costs around one batch: the batch without proposals, then every further token."""

    n_batched: float
    """Tokens without any proposal."""
    uniform: StepCost | None
    """Coefficients of a step in which all requests verify equally many; None: such a step is impossible here."""
    ragged: StepCost
    beyond: StepCost | None
    """Coefficients from `largest_graph_tokens` on; None: the engine runs without graphs, or they never matter."""
    largest_graph_tokens: float
    fixed_uniform_s: float
    """Seconds of the batch less what its own tokens cost: constant, context and request terms."""
    fixed_ragged_s: float
    fixed_beyond_s: float

    def ragged_s(self, more: Floats) -> Floats:
        """Seconds with `more` proposed tokens (any shape) of unequal lengths."""
        return self._seconds(more, self.ragged, self.fixed_ragged_s)

    def uniform_s(self, more: Floats) -> Floats:
        """Seconds with `more` proposed tokens, equally many for every request."""
        return self._seconds(more, self.uniform or self.ragged, self.fixed_uniform_s)

    def plain_s(self) -> float:
        """Seconds without any proposal."""
        cost, tokens = self.uniform or self.ragged, self.n_batched
        if self.beyond is not None and tokens > self.largest_graph_tokens:
            return self.fixed_beyond_s + _seconds_of(tokens, self.beyond)
        return self.fixed_uniform_s + _seconds_of(tokens, cost)

    def token_prices_s(self) -> list[float]:
        """What one more token may cost: below and above each knee, lowest first."""
        costs = (self.ragged,) if self.beyond is None else (self.ragged, self.beyond)
        below = {cost.per_batched_token_s for cost in costs}
        return sorted(below | {cost.per_batched_token_s + cost.per_batched_token_above_knee_s for cost in costs})

    def bends(self) -> list[float]:
        """Further tokens at which the price of one more changes: knees, and the end of the graphs."""
        costs = (self.ragged,) if self.beyond is None else (self.ragged, self.beyond)
        bends = {cost.knee_tokens - self.n_batched for cost in costs if cost.per_batched_token_above_knee_s > 0}
        if self.beyond is not None:
            bends.add(math.floor(self.largest_graph_tokens) - self.n_batched)
        return [bend for bend in bends if bend > 0]

    def _seconds(self, more: Floats, cost: StepCost, fixed_s: float) -> Floats:
        tokens = more + self.n_batched
        seconds = _token_seconds(tokens, cost, fixed_s)
        if self.beyond is None:
            return seconds
        past = _token_seconds(tokens, self.beyond, self.fixed_beyond_s)
        return np.where(tokens > self.largest_graph_tokens, past, seconds)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A plan and its worth: expected tokens beyond the bonus ones, less lambda times the step's seconds."""

    lengths: Ints
    """(N,)"""
    value: float


def best_lengths(gains: Floats, query_costs_s: Floats, price: TargetPrice, rate: float, budget: int) -> Lengths:
    """The best of all ragged and uniform plans for proposals that are there.

    gains: (N, K), the product of hazards, 0 where a request has no proposal or may not verify it.
    query_costs_s: (N,), what a further query token costs for its request's context.
    rate: lambda in tokens per second. budget: most proposals the step may verify in all.
    """
    scores = gains - rate * query_costs_s[:, None] if query_costs_s.any() else gains
    ragged = _best_ragged(gains, scores, price, rate, budget)
    if price.uniform is None or len(gains) == 0:
        return ragged
    uniform = _best_uniform(gains, scores, price, rate, budget)
    # Equal worth: the uniform plan, whose graph is the cheaper one to be wrong about.
    return uniform if uniform.value >= ragged.value else ragged


def _best_ragged(gains: Floats, scores: Floats, price: TargetPrice, rate: float, budget: int) -> Lengths:
    flat = scores.ravel()
    worthwhile = (gains.ravel() > 0) & (flat > rate * price.token_prices_s()[0])
    candidates = worthwhile.nonzero()[0]
    order = candidates[(-flat[candidates]).argsort()][: max(0, budget)]
    values = -rate * price.ragged_s(np.arange(len(order) + 1, dtype=float))
    values[1:] += flat[order].cumsum()
    best = int(values.argmax())
    lengths = np.bincount(order[:best] // gains.shape[1], minlength=len(gains))
    return Lengths(lengths, float(values[best]))


def _best_uniform(gains: Floats, scores: Floats, price: TargetPrice, rate: float, budget: int) -> Lengths:
    requests = len(gains)
    longest = int((gains > 0).sum(axis=1).min())
    most = min(longest, max(0, budget) // requests)  # k = 0 is always among them
    values = -rate * price.uniform_s(np.arange(most + 1, dtype=float) * requests)
    values[1:] += scores.sum(axis=0).cumsum()[:most]
    best = int(values.argmax())
    return Lengths(np.full(requests, best), float(values[best]))


def values_by_draft_length(
    gains: Floats, offers: Floats, query_costs_s: Floats, price: TargetPrice, rate: float, budget: int
) -> Floats:
    """Worth of proposing K = 0..max tokens, before the draft's own cost, in each of S scenarios: (S, K+1).

    gains: (S, N, K) products of hazards of the chosen drafters, 0 where a request may not speculate. offers: the
    same shape, the probability that there is a proposal; a position costs and gains in that proportion, so the
    ranking is still the product of hazards. The best verification lengths are assumed for every K. Along the
    ranking the worth is concave between the price's bends, so its maximum is where the score falls to a token's
    price, or at a bend: only those prefixes are looked at.
    """
    scores = gains - rate * query_costs_s[:, None] if query_costs_s.any() else gains
    weights = np.where(gains > 0, offers, 0.0)
    floors = rate * np.array(price.token_prices_s())
    taken = weights * (scores > floors[:, None, None, None])  # (prices, S, N, K)
    more = taken.sum(axis=2).cumsum(axis=2)  # (prices, S, K)
    worth = (taken * scores).sum(axis=2).cumsum(axis=2) - rate * price.ragged_s(more)
    most = float(more[0].max(initial=0.0))  # the lowest price takes most
    ends = [end for bend in price.bends() for end in {math.floor(bend), math.ceil(bend)} if end < most]
    if most > budget:
        worth[more > budget] = -np.inf
        ends = [end for end in ends if end < budget] + [max(0, budget)]
    plain = -rate * price.plain_s()
    values = np.empty((len(gains), gains.shape[2] + 1))
    values[:, 0] = plain
    values[:, 1:] = np.maximum(worth.max(axis=0), plain)
    for scenario in np.flatnonzero(more[0].max(axis=1) > min(ends, default=np.inf)):
        filled = _filled(scores[scenario], weights[scenario], np.array(ends, dtype=float), floors[0], price, rate)
        np.maximum(values[scenario, 1:], filled, out=values[scenario, 1:])
    if price.uniform is not None:
        values[:, 1:] = np.maximum(values[:, 1:], _uniform_values(scores, weights, price, rate, budget))
    return values


def _filled(scores: Floats, weights: Floats, ends: Floats, floor: float, price: TargetPrice, rate: float) -> Floats:
    """Worth of the highest positions (of (N, K)) that fill up to one of `ends` further tokens: (K,)."""
    positions = scores.shape[1]
    score, weight = scores.ravel(), weights.ravel()
    candidates = ((weight > 0) & (score > floor)).nonzero()[0]
    order = candidates[(-score[candidates]).argsort()]
    weighed = weight[order] * ((order % positions) <= np.arange(positions)[:, None])  # (K, M)
    before = weighed.cumsum(axis=1) - weighed
    tokens = [np.minimum(weighed, np.maximum(end - before, 0.0)) @ score[order] for end in ends]
    return np.asarray((np.array(tokens) - rate * price.ragged_s(ends)[:, None]).max(axis=0))


def _uniform_values(scores: Floats, weights: Floats, price: TargetPrice, rate: float, budget: int) -> Floats:
    """Worth of all requests verifying the same k <= K: (S, K); -inf where some request cannot."""
    requests = scores.shape[1]
    sizes = np.arange(1, scores.shape[2] + 1)
    possible = (weights >= 1.0).all(axis=1) & (sizes * requests <= budget)  # (S, K)
    worth = scores.sum(axis=1).cumsum(axis=1) - rate * price.uniform_s((sizes * requests).astype(float))
    return np.asarray(np.maximum.accumulate(np.where(possible, worth, -np.inf), axis=1))


def _token_seconds(tokens: Floats, cost: StepCost, fixed_s: float) -> Floats:
    seconds = cost.per_batched_token_s * tokens + fixed_s
    if cost.per_batched_token_above_knee_s > 0:
        seconds += cost.per_batched_token_above_knee_s * np.maximum(tokens - cost.knee_tokens, 0.0)
    return seconds


def _seconds_of(tokens: float, cost: StepCost) -> float:
    above = max(0.0, tokens - cost.knee_tokens)
    return cost.per_batched_token_s * tokens + cost.per_batched_token_above_knee_s * above
