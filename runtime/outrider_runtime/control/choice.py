"""Choice of lengths: TurboSpec's ArgMaxGoodput, generalised to one length per request.

Maximise `E[tokens] - lambda * T_step`. Of all sets of positions (request i, position j) of one size the best holds
the highest products of hazards, and as a product falls with j it never skips a position of a chain. So one
ranking is enough: the best set of any size is a prefix of it.
"""

from __future__ import annotations

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
    beyond: StepCost
    largest_graph_tokens: float
    """From more tokens on, `beyond` holds; infinity without graphs."""
    fixed_uniform_s: float
    """Seconds of the batch less what its own tokens cost: constant, context and request terms."""
    fixed_ragged_s: float
    fixed_beyond_s: float

    def ragged_s(self, more: Floats) -> Floats:
        """Seconds with `more` proposed tokens (any shape) of unequal lengths."""
        return self._seconds(more, self.ragged, self.fixed_ragged_s)

    def uniform_s(self, more: Floats) -> Floats:
        """Seconds with `more` proposed tokens, equally many for every request."""
        cost = self.uniform or self.ragged
        return self._seconds(more, cost, self.fixed_uniform_s)

    def marginal_s(self) -> float:
        """The cheapest that one more token can be; a position worth less than this is never chosen."""
        return min(self.ragged.per_batched_token_s, self.beyond.per_batched_token_s)

    def _seconds(self, more: Floats, cost: StepCost, fixed_s: float) -> Floats:
        tokens = more + self.n_batched
        seconds = fixed_s + _token_seconds(tokens, cost)
        if self.largest_graph_tokens == np.inf:
            return seconds
        past = self.fixed_beyond_s + _token_seconds(tokens, self.beyond)
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
    ragged = _best_ragged(gains, query_costs_s, price, rate, budget)
    if price.uniform is None or len(gains) == 0:
        return ragged
    uniform = _best_uniform(gains, query_costs_s, price, rate, budget)
    # Equal worth: the uniform plan, whose graph is the cheaper one to be wrong about.
    return uniform if uniform.value >= ragged.value else ragged


def _best_ragged(gains: Floats, query_costs_s: Floats, price: TargetPrice, rate: float, budget: int) -> Lengths:
    scores = gains - rate * query_costs_s[:, None]
    flat = scores.ravel()
    candidates = np.flatnonzero((gains.ravel() > 0) & (flat > rate * price.marginal_s()))
    order = candidates[np.argsort(-flat[candidates])][: max(0, budget)]
    worth = np.concatenate([[0.0], np.cumsum(flat[order])])
    values = worth - rate * price.ragged_s(np.arange(len(order) + 1, dtype=float))
    best = int(values.argmax())
    lengths = np.bincount(order[:best] // gains.shape[1], minlength=len(gains))
    return Lengths(lengths, float(values[best]))


def _best_uniform(gains: Floats, query_costs_s: Floats, price: TargetPrice, rate: float, budget: int) -> Lengths:
    requests = len(gains)
    longest = int((gains > 0).sum(axis=1).min())
    sizes = np.arange(min(longest, max(0, budget) // requests) + 1)  # k = 0 is always among them
    worth = np.concatenate([[0.0], np.cumsum((gains - rate * query_costs_s[:, None]).sum(axis=0))])[sizes]
    values = worth - rate * price.uniform_s((sizes * requests).astype(float))
    best = int(values.argmax())
    return Lengths(np.full(requests, sizes[best]), float(values[best]))


def values_by_draft_length(
    gains: Floats, offers: Floats, query_costs_s: Floats, price: TargetPrice, rate: float, budget: int
) -> Floats:
    """Worth of proposing K = 0..max tokens, before the draft's own cost: (K+1,).

    gains: (N, K) products of hazards of the chosen drafter, 0 where a request may not speculate. offers: (N, K),
    the probability that there is a proposal; a position costs and gains in that proportion, so the ranking is still
    the product of hazards. The best verification lengths are assumed for every K.
    """
    scores = gains - rate * query_costs_s[:, None]
    flat, weights = scores.ravel(), offers.ravel()
    candidates = np.flatnonzero((gains.ravel() > 0) & (flat > rate * price.marginal_s()))
    order = candidates[np.argsort(-flat[candidates])]
    positions = np.arange(gains.shape[1])
    allowed = (order % gains.shape[1]) <= positions[:, None]  # (K, M)
    weights = np.where(allowed, weights[order], 0.0)
    more = np.minimum(np.cumsum(weights, axis=1), max(0, budget))
    taken = np.diff(more, axis=1, prepend=0.0)
    worth = np.cumsum(taken * flat[order], axis=1) - rate * price.ragged_s(more)
    nothing = -rate * float(price.uniform_s(np.zeros(1))[0])
    best = worth.max(axis=1, initial=nothing)
    if price.uniform is not None and len(gains):
        best = np.maximum(best, _uniform_values(scores, gains, offers, price, rate, budget))
    return np.concatenate([[nothing], best])


def _uniform_values(
    scores: Floats, gains: Floats, offers: Floats, price: TargetPrice, rate: float, budget: int
) -> Floats:
    """Worth of all requests verifying the same k <= K: (K,); -inf where some request cannot."""
    sizes = np.arange(1, gains.shape[1] + 1)
    possible = ((gains > 0) & (offers >= 1.0)).all(axis=0) & (sizes * len(gains) <= max(0, budget))
    worth = np.cumsum(scores.sum(axis=0)) - rate * price.uniform_s((sizes * len(gains)).astype(float))
    return np.asarray(np.maximum.accumulate(np.where(possible, worth, -np.inf)))


def _token_seconds(tokens: Floats, cost: StepCost) -> Floats:
    above = np.maximum(tokens - cost.knee_tokens, 0.0)
    return cost.per_batched_token_s * tokens + cost.per_batched_token_above_knee_s * above
