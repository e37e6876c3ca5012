"""The closed loop's decision at one step: which drafter for whom, and how many tokens. Pure functions on arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.choice import TargetPrice, values_by_draft_length

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOBODY = -1
"""In place of a drafter's number: nothing is proposed for the request."""


@dataclass(frozen=True, slots=True)
class DraftProblem:
    """All that a choice of drafters and draft length rests on. D drafters, N decoding requests, K positions."""

    gains: Floats
    """(D, N, K): products of hazards; 0 past a request's room."""
    offers: Floats
    """(D, N, K): probability that the drafter has a proposal there."""
    usable: Bools
    """(D, N)"""
    neural: int
    """Number of the neural drafter, or NOBODY."""
    draft_s: Floats
    """(D, K+1): the drafter's seconds for each draft length; column 0 is not used."""
    query_costs_s: Floats
    """(N,)"""
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
    lookups = problem.usable.copy()
    if problem.neural != NOBODY:
        lookups[problem.neural] = False
    choice = _choose_among(problem, lookups)
    if problem.neural != NOBODY and problem.usable[problem.neural].any():
        with_neural = _choose_among(problem, problem.usable)
        # Equal worth: without the neural draft, which then need not run.
        choice = with_neural if with_neural.value > choice.value else choice
    return choice


def _choose_among(problem: DraftProblem, usable: Bools) -> DraftChoice:
    worth = _worth_by_position(problem)
    drafters = _best_drafters(worth.sum(axis=2), usable)
    values = _values(problem, drafters)
    best = int(values.argmax())  # the first, so the shortest, of equal ones
    if best == 0:
        return DraftChoice(0, np.full(len(drafters), NOBODY), float(values[0]), float(values[0]))
    drafters = _best_drafters(worth[:, :, :best].sum(axis=2), usable)
    return DraftChoice(best, drafters, float(values[best]), float(values[0]))


def _worth_by_position(problem: DraftProblem) -> Floats:
    """(D, N, K): what each position adds, its own target cost deducted; positions that do not pay count 0."""
    price = problem.price
    cost = price.ragged.per_batched_token_s
    if price.n_batched >= price.ragged.knee_tokens:
        cost += price.ragged.per_batched_token_above_knee_s
    spent = problem.rate * (cost + problem.query_costs_s[:, None])
    return np.asarray(np.maximum(problem.gains - spent, 0.0) * problem.offers)


def _best_drafters(worth: Floats, usable: Bools) -> Ints:
    """(N,): per request the drafter of the highest worth (the pool's order breaks ties), NOBODY where none pays."""
    if len(worth) == 0:
        return np.full(worth.shape[1], NOBODY)
    worth = np.where(usable, worth, 0.0)
    best = worth.argmax(axis=0)
    return np.where(worth.max(axis=0) > 0, best, NOBODY)


def _values(problem: DraftProblem, drafters: Ints) -> Floats:
    """(K+1,): worth of each draft length with these drafters, the drafts' own time included."""
    requests = np.arange(len(drafters))
    chosen = drafters != NOBODY
    if not chosen.any():
        return -problem.rate * problem.price.uniform_s(np.zeros(1))
    gains = np.where(chosen[:, None], problem.gains[drafters, requests], 0.0)
    offers = problem.offers[drafters, requests]
    values = values_by_draft_length(gains, offers, problem.query_costs_s, problem.price, problem.rate, problem.budget)
    used = np.unique(drafters[chosen])
    values[1:] -= problem.rate * problem.draft_s[used, 1:].sum(axis=0)
    return values
