"""The closed loop's decision at one step: which drafter for whom, and how many tokens. Pure functions on arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.choice import TargetPrice, values_by_draft_length

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LEAST_GAIN = 1e-5
"""Tokens; less is rounding, and no reason to speculate."""
NOBODY = -1
"""In place of a drafter's number: nothing is proposed for the request."""


@dataclass(frozen=True, slots=True)
class DraftProblem:
    """All that a choice of drafters and draft length rests on. D drafters, N decoding requests, K positions."""

    gains: Floats
    """(D, K, N): products of hazards; 0 past a request's room."""
    offers: Floats
    """(D, K, N): probability that the drafter has a proposal there."""
    usable: Bools
    """(D, N)"""
    neural: int
    """Number of the neural drafter, or NOBODY."""
    draft_s: Floats
    """(D, K+1): the drafter's seconds for each draft length; column 0 is not used."""
    query_costs_s: Floats
    """(N,): what a verified token costs for its request's context."""
    neural_token_s: float
    """What it costs in the neural draft's first pass, which covers every token of the target's step."""
    price: TargetPrice
    rate: float
    """lambda, tokens per second."""
    budget: int


@dataclass(frozen=True, slots=True)
class DraftChoice:
    draft_tokens: int
    drafters: Ints
    """(N,): drafter numbers, or NOBODY."""
    value: float
    """`E[tokens] - lambda * T_step`, bonus tokens left out."""
    plain_value: float
    """The same for k = 0."""

    @property
    def gain(self) -> float:
        """Expected tokens that speculation is worth in this step; 0 when k = 0 is the choice."""
        return self.value - self.plain_value


def choose_draft(problem: DraftProblem) -> DraftChoice:
    """The best of: no speculation, the lookups alone, the lookups beside the neural drafter."""
    scenarios = _scenarios(problem)
    plain = -problem.rate * problem.price.plain_s()
    nothing = DraftChoice(0, np.full(problem.usable.shape[1], NOBODY), plain, plain)
    if not scenarios.any():
        return nothing
    worth = _worth_by_position(problem)
    drafters = _best_drafters(worth.sum(axis=1), scenarios)
    values = _values(problem, drafters)
    best = int(values.argmax())  # the first of equal ones: without the neural draft, and the shortest
    scenario, draft_tokens = divmod(best, values.shape[1])
    if draft_tokens == 0 or values[scenario, draft_tokens] - plain < LEAST_GAIN:
        return nothing
    chosen = drafters[scenario]
    if len(worth) > 1 and draft_tokens < worth.shape[1]:
        # Who serves a request best may be another where the chain is shorter.
        chosen = _best_drafters(worth[:, :draft_tokens].sum(axis=1), scenarios[scenario : scenario + 1])[0]
    return DraftChoice(draft_tokens, chosen, float(values[scenario, draft_tokens]), plain)


def _scenarios(problem: DraftProblem) -> Bools:
    """(S, D, N): who may be used when the neural drafter does not run, and when it does."""
    if problem.neural == NOBODY or not problem.usable[problem.neural].any():
        return problem.usable[None]
    if len(problem.usable) == 1:
        return problem.usable[None]
    both = np.repeat(problem.usable[None], 2, axis=0)
    both[0, problem.neural] = False
    return both


def _worth_by_position(problem: DraftProblem) -> Floats:
    """(D, K, N): what each position adds, its own target cost deducted; positions that do not pay count 0."""
    price = problem.price
    cost = price.ragged.per_batched_token_s
    if price.n_batched >= price.ragged.knee_tokens:
        cost += price.ragged.per_batched_token_above_knee_s
    spent = np.full((len(problem.gains), 1, 1), problem.rate * cost, dtype=problem.gains.dtype)
    if problem.neural != NOBODY:
        spent[problem.neural] += problem.rate * problem.neural_token_s
    if problem.query_costs_s.any():
        spent = spent + problem.rate * problem.query_costs_s  # (D, 1, N)
    worth = np.maximum(problem.gains - spent, 0.0)
    worth *= problem.offers
    return worth


def _best_drafters(worth: Floats, scenarios: Bools) -> Ints:
    """(S, N): per request the drafter of the highest worth (the pool's order breaks ties), NOBODY where none pays.

    worth: (D, N). scenarios: (S, D, N).
    """
    allowed = worth * scenarios
    best = allowed.argmax(axis=1)
    return np.where(allowed.max(axis=1) > 0, best, NOBODY)


def _values(problem: DraftProblem, drafters: Ints) -> Floats:
    """(S, K+1): worth of each draft length with these drafters (S, N), the drafts' own time included."""
    gains, offers = _of_chosen(problem.gains, drafters), _of_chosen(problem.offers, drafters)
    offers = offers * (drafters != NOBODY)[:, None]
    used = (drafters[:, None] == np.arange(len(problem.gains))[:, None]).any(axis=2)  # (S, D)
    costs = problem.query_costs_s + problem.neural_token_s * used[:, problem.neural, None]  # (S, N)
    values = values_by_draft_length(gains, offers, costs, problem.price, problem.rate, problem.budget)
    values[:, 1:] -= problem.rate * (used @ problem.draft_s[:, 1:])
    return values


def _of_chosen(values: Floats, drafters: Ints) -> Floats:
    """(S, K, N): of `values` (D, K, N) those of each request's drafter, (S, N); anything where it has none."""
    chosen = np.broadcast_to(values[0], (len(drafters), *values.shape[1:]))
    for number in range(1, len(values)):
        chosen = np.where((drafters == number)[:, None], values[number], chosen)
    return chosen
