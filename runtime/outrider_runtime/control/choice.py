"""Choice of lengths: TurboSpec's ArgMaxGoodput, generalised to one length per request.

Maximise `E[tokens] - lambda * T_step`. Of all sets of positions (request i, position j) of one size the best holds
the highest products of hazards, and as a product falls with j it never skips a position of a chain. So one
ranking is enough: the best set of any size is a prefix of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.costs import StepCost

CHORDS = (0.0, 0.4, 1.0)
"""Between the lowest and the highest price of a token: where prefixes are looked at when bends are near."""

Floats = NDArray[np.floating[Any]]
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
    plain_more_s: float = 0.0
    """What a step without any proposal takes beyond what `uniform` says of it."""
    logits_s: float = 0.0
    """What a prompt's token spares: the coefficients above are those of tokens that decode."""
    prompt_factor: float = 1.0
    """By which prompts lengthen a step more than `ragged` says."""

    def ragged_s(self, more: Floats) -> Floats:
        """Seconds with `more` proposed tokens (any shape) of unequal lengths."""
        return self._seconds(more, self.ragged, self.fixed_ragged_s)

    def uniform_s(self, more: Floats) -> Floats:
        """Seconds with `more` proposed tokens, equally many for every request."""
        return self._seconds(more, self.uniform or self.ragged, self.fixed_uniform_s)

    def ragged_run_s(self, first: int, last: int) -> Floats:
        """(last - first + 1,): ragged_s of first, first + 1, ... last tokens; several times in every step."""
        return self._run_s(np.arange(first, last + 1.0), self.ragged, self.fixed_ragged_s)

    def plain_s(self) -> float:
        """Seconds without any proposal."""
        return self._seconds_at(0.0, self.uniform or self.ragged, self.fixed_uniform_s) + self.plain_more_s

    def decode_s(self, verified: int) -> float:
        """Seconds with so many proposals in all, and no prompt."""
        return float(self.ragged_s(np.array(float(verified)))) if verified else self.plain_s()

    def prompt_s(self, verified: int, tokens: Floats) -> Floats:
        """By how much `tokens` of prompts (any shape) lengthen a step that verifies so many proposals. The first one
        costs more than a token: equally many for every request, or none, is over."""
        longer = self.ragged_s(verified + tokens) - self.logits_s * tokens - self.decode_s(verified)
        return np.asarray(self.prompt_factor * np.maximum(longer, (self.token_s() - self.logits_s) * tokens))

    def ragged_plain_s(self) -> float:
        """The same, run as steps of unequal lengths are."""
        return self._seconds_at(0.0, self.ragged, self.fixed_ragged_s)

    def lowest_s(self) -> float:
        """The cheapest that one more token can be; a position worth less is never chosen."""
        if self.beyond is None:
            return self.ragged.per_batched_token_s
        return min(self.ragged.per_batched_token_s, self.beyond.per_batched_token_s)

    def floors_s(self, bent: bool) -> list[float]:
        """Prices of a token at which to look for the best prefix, lowest first; `bent`: a bend may lie in reach."""
        if not bent:
            return [self.token_s()]
        costs = (self.ragged,) if self.beyond is None else (self.ragged, self.beyond)
        low = self.lowest_s()
        high = max(cost.per_batched_token_s + cost.per_batched_token_above_knee_s for cost in costs)
        if high == low:
            high = 2 * low + 1e-12
        return [low + share * (high - low) for share in CHORDS]

    def token_s(self) -> float:
        """What the next token costs."""
        past_graphs = self.beyond is not None and self.n_batched > self.largest_graph_tokens
        cost = self.beyond if past_graphs and self.beyond is not None else self.ragged
        return cost.token_s(self.n_batched)

    def bends(self) -> list[float]:
        """Further tokens at which the price of one more changes: knees, and the end of the graphs."""
        costs = (self.ragged,) if self.beyond is None else (self.ragged, self.beyond)
        bends = {cost.knee_tokens - self.n_batched for cost in costs if cost.per_batched_token_above_knee_s > 0}
        if self.beyond is not None:
            bends.add(math.floor(self.largest_graph_tokens) - self.n_batched)
        return [bend for bend in bends if bend > 0]

    def _seconds(self, more: Floats, cost: StepCost, fixed_s: float) -> Floats:
        tokens = self.n_batched + more
        seconds = _at(tokens, cost, fixed_s)
        if self.beyond is not None and tokens.size and tokens.max() > self.largest_graph_tokens:
            outside = _at(tokens, self.beyond, self.fixed_beyond_s)
            seconds = np.where(tokens > self.largest_graph_tokens, outside, seconds)
        return seconds

    def _run_s(self, more: Floats, cost: StepCost, fixed_s: float) -> Floats:
        """_seconds of rising numbers of tokens: each bend is found once, and only what lies behind it is changed."""
        more += self.n_batched
        seconds = _rising(more, cost, fixed_s)
        if self.beyond is not None and more[-1] > self.largest_graph_tokens:
            outside = int(more.searchsorted(self.largest_graph_tokens, side="right"))
            seconds[outside:] = _rising(more[outside:], self.beyond, self.fixed_beyond_s)
        return seconds

    def _seconds_at(self, more: float, cost: StepCost, fixed_s: float) -> float:
        tokens = self.n_batched + more
        if self.beyond is not None and tokens > self.largest_graph_tokens:
            cost, fixed_s = self.beyond, self.fixed_beyond_s
        above = max(0.0, tokens - cost.knee_tokens)
        return fixed_s + cost.per_batched_token_s * tokens + cost.per_batched_token_above_knee_s * above


def _at(tokens: Floats, cost: StepCost, fixed_s: float) -> Floats:
    """Seconds of steps that batch so many tokens, within one execution mode."""
    seconds = fixed_s + cost.per_batched_token_s * tokens
    if cost.per_batched_token_above_knee_s > 0:
        seconds += cost.per_batched_token_above_knee_s * np.maximum(tokens - cost.knee_tokens, 0.0)
    return np.asarray(seconds)


def _rising(tokens: Floats, cost: StepCost, fixed_s: float) -> Floats:
    """_at for rising `tokens` (T,)."""
    seconds = cost.per_batched_token_s * tokens
    seconds += fixed_s
    if cost.per_batched_token_above_knee_s > 0 and tokens[-1] > cost.knee_tokens:
        above = int(tokens.searchsorted(cost.knee_tokens))
        seconds[above:] += cost.per_batched_token_above_knee_s * (tokens[above:] - cost.knee_tokens)
    return seconds


@dataclass(frozen=True, slots=True)
class Lengths:
    """A plan and its worth: expected tokens beyond the bonus ones, less lambda times the step's seconds."""

    lengths: Ints
    """(N,)"""
    value: float


def best_lengths(
    gains: Floats, token_costs_s: Floats, price: TargetPrice, rate: float, budget: int,
    *, forced: Ints | None = None, longest_s: float = math.inf,
) -> Lengths:  # fmt: skip
    """The best of all ragged and uniform plans for proposals that are there.

    gains: (K, N), the product of hazards, 0 where a request has no proposal or may not verify it.
    token_costs_s: (N,), what a verified token costs beyond the target's price: for its request's context, and in the
    draft's first pass, which covers it.
    rate: lambda in tokens per second. budget: most proposals the step may verify in all. forced: (N,), positions that
    are verified whatever they are worth; they fit into the budget. longest_s: what is verified beyond them must not
    make the target's pass longer than this.
    """
    scores = gains - (rate * token_costs_s).astype(gains.dtype) if token_costs_s.any() else gains
    ragged = _best_ragged(gains, scores, price, rate, budget, forced, longest_s)
    if price.uniform is None or gains.size == 0:
        return ragged
    uniform = _best_uniform(gains, scores, price, rate, budget, forced, longest_s)
    # Equal worth: the uniform plan, whose graph is the cheaper one to be wrong about.
    return uniform if uniform.value >= ragged.value else ragged


def _best_ragged(
    gains: Floats, scores: Floats, price: TargetPrice, rate: float, budget: int, forced: Ints | None, longest_s: float
) -> Lengths:
    taken, worth = 0, 0.0
    if forced is not None:
        first = np.arange(len(gains))[:, None] < forced
        taken, worth = int(forced.sum()), float(scores[first].sum())
        scores = np.where(first, -np.inf, scores)  # no candidates any more
    # A gain of 0 scores 0 or less, so it is no candidate.
    ranked = np.sort(scores[scores > rate * price.lowest_s()])[::-1][: max(0, budget - taken)]
    seconds = price.ragged_run_s(taken, taken + len(ranked))
    values = worth - rate * seconds
    values[1:] += ranked.cumsum(dtype=float)
    if longest_s < math.inf:
        values[1:][seconds[1:] > longest_s] = -np.inf
    best = int(values.argmax())
    lengths = _reaching(scores, ranked[:best])
    return Lengths(lengths if forced is None else lengths + forced, float(values[best]))


def _reaching(scores: Floats, best: Floats) -> Ints:
    """(N,): how many positions of each request are among the `best` scores, highest first. Of equal ones at the end the
    first requests' count: chains fall, so they are the last of their request."""
    if not len(best):
        return np.zeros(scores.shape[1], dtype=int)
    lengths = (scores >= best[-1]).sum(axis=0)
    surplus = int(lengths.sum()) - len(best)
    if surplus > 0:
        equal = (scores == best[-1]).sum(axis=0)[::-1]
        lengths -= np.clip(surplus - (equal.cumsum() - equal), 0, equal)[::-1]
    return np.asarray(lengths)


def _best_uniform(
    gains: Floats, scores: Floats, price: TargetPrice, rate: float, budget: int, forced: Ints | None, longest_s: float
) -> Lengths:
    """Value -inf where no uniform plan holds what is forced."""
    requests = gains.shape[1]
    # Chains have no gaps, and as a rule all have the same length.
    longest = len(gains) if gains[-1].all() else int((gains > 0).all(axis=1).sum())
    most = min(longest, max(0, budget) // requests)  # k = 0 is always among them
    seconds = price.uniform_s(np.arange(most + 1, dtype=float) * requests)
    seconds[0] = price.plain_s()
    values = -rate * seconds
    values[1:] += scores[:most].sum(axis=1).cumsum()
    if forced is not None:
        values[: int(forced.max(initial=0))] = -np.inf
        values[seconds > longest_s] = -np.inf
    best = int(values.argmax())
    return Lengths(np.full(requests, best), float(values[best]))


def values_by_draft_length(
    gains: Floats, offers: Floats, token_costs_s: Floats, price: TargetPrice, rate: float, budget: int,
    forced: NDArray[np.bool_] | None = None,
) -> Floats:  # fmt: skip
    """Worth of proposing K = 0..max tokens, before the draft's own cost, in each of S scenarios: (S, K+1).

    gains: (S, K, N) products of hazards of the chosen drafters, 0 where a request may not speculate. offers: the
    same shape, the probability that there is a proposal; a position costs and gains in that proportion, so the
    ranking is still the product of hazards. token_costs_s: (S, N), as in best_lengths. The best verification lengths
    are assumed for every K. forced: (S, K, N), positions that are verified whatever they are worth.

    Along the ranking the worth is concave between the price's bends, so its maximum lies where the score falls to a
    token's price, or at a bend. No sorting is needed: "all positions that score more than a price" is a prefix of
    the ranking. What a prefix that ends at a bend gains is read off the chord between two such prefixes: exact where
    no bend is crossed, never too high elsewhere (verification then ranks exactly).
    """
    scores = gains - (rate * token_costs_s[:, None]).astype(gains.dtype) if token_costs_s.any() else gains
    positions, requests = gains.shape[1:]
    room = float(max(0, budget))
    ends = [end for end in {room, *(min(bend, room) for bend in price.bends())} if end < requests * positions]
    floors = np.array([rate * floor for floor in price.floors_s(bool(ends))], dtype=gains.dtype)
    above = scores > floors[:, None, None, None]  # (floors, S, K, N)
    taken = offers * (above if forced is None else above | forced)
    more = taken.sum(axis=3).cumsum(axis=2, dtype=float)  # (floors, S, K)
    taken *= scores
    worth = taken.sum(axis=3).cumsum(axis=2, dtype=float)
    values = np.empty((len(gains), positions + 1))
    values[:, 0] = -rate * price.plain_s()
    best = values[:, 1:]
    net = worth - rate * price.ragged_s(more)
    if room < requests * positions:
        net[more > room] = -np.inf
    net.max(axis=0, out=best)
    if ends:
        np.maximum(best, _at_ends(more, worth, np.array(ends), price, rate), out=best)
    if forced is not None:
        return values
    if price.uniform is not None and price.uniform is not price.ragged:
        # Only where the neural drafter serves all requests can they verify equally many: the last scenario.
        np.maximum(best[-1], uniform_values(scores[-1], gains[-1], offers[-1], price, rate, budget), out=best[-1])
    np.maximum(best, values[:, :1], out=best)
    return values


def _at_ends(more: Floats, worth: Floats, ends: Floats, price: TargetPrice, rate: float) -> Floats:
    """Worth of the best prefix that ends at one of `ends` (E,) proposals: (S, K), -inf where none goes so far.

    more, worth: (floors, S, K), proposals and gain of the prefixes that are known, the longest first.
    """
    longer, shorter = more[:-1], more[1:]
    slope = (worth[:-1] - worth[1:]) / np.maximum(longer - shorter, 1e-9)
    at = ends[:, None, None, None]
    chord = worth[1:] + slope * (at - shorter) - (rate * price.ragged_s(ends))[:, None, None, None]
    inside = (shorter <= at) & (at <= longer)
    return np.asarray(np.where(inside, chord, -np.inf).max(axis=(0, 1)))


def uniform_values(
    scores: Floats, gains: Floats, offers: Floats, price: TargetPrice, rate: float, budget: int
) -> Floats:
    """Worth of all requests verifying the same k <= K: (K,), from (K, N); -inf where some request cannot."""
    positions, requests = scores.shape
    sizes = np.arange(1, positions + 1) * requests
    possible = ((gains > 0) & (offers >= 1.0)).all(axis=1) & (sizes <= budget)
    worth = scores.sum(axis=1).cumsum() - rate * price.uniform_s(sizes.astype(float))
    return np.asarray(np.maximum.accumulate(np.where(possible, worth, -np.inf)))
