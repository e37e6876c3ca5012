"""The closed loop's decision at one step: which drafter for whom, and how many tokens. Pure functions on arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.beside import choose_lookups_first
from outrider_runtime.control.choice import values_by_draft_length
from outrider_runtime.control.drafting import NOBODY, DraftChoice, DraftProblem, Pressure, nobody
from outrider_runtime.control.slo import MOST_LOSS, forced_lengths, is_crowd, shortfalls
from outrider_runtime.control.straight import choose_on_straight_cost

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LEAST_GAIN = 1e-5
"""Tokens; less is rounding, and no reason to speculate."""
EQUAL_SHORTFALL = 0.02
"""Tokens a request; draft lengths that leave those behind their TPOT as short as this are told apart by their worth."""


def choose_draft(problem: DraftProblem) -> DraftChoice:
    """The best of: no speculation, the lookups alone, the neural drafter alone, both side by side.

    Exactly the best for the model where a verified token costs the same however many there are. Across a knee, the
    graphs' end or a budget, one length serves all drafters, or the neural draft stands in for lookups that fail; where
    requests are behind their TPOT (they come first), one length.
    """
    plain = -problem.rate * problem.price.plain_s()
    nothing = nobody(problem.usable.shape[1], plain, for_slo=problem.pressure is not None)
    if not problem.usable.any() or problem.gains.shape[1] == 0:
        return nothing
    if problem.pressure is not None:
        paced = _on_bent_cost(problem, _worth_by_position(problem), plain, least_gain=-math.inf) or nothing
        if not is_crowd(problem.pressure.behind):
            return paced
        by_goodput = choose_draft(replace(problem, pressure=None))
        return paced if by_goodput.value - paced.value <= MOST_LOSS * -plain else by_goodput
    reach = problem.gains.shape[1] * problem.gains.shape[2]
    if problem.budget < reach or any(bend < reach for bend in problem.price.bends()):
        worth = _worth_by_position(problem)
        best = _on_bent_cost(problem, worth, plain, least_gain=LEAST_GAIN) or nothing
        beside = choose_lookups_first(problem, worth, plain)
        if beside is not None and beside.value - best.value >= LEAST_GAIN:
            best = beside
        known = best.draft_tokens > 0 and problem.budget >= reach and problem.price.beyond is None
        return _with_paying(problem, best) if known else best
    choice = choose_on_straight_cost(problem, plain)
    return choice if choice is not None and choice.gain >= LEAST_GAIN else nothing


def _on_bent_cost(problem: DraftProblem, worth: Floats, plain: float, least_gain: float) -> DraftChoice | None:
    """One length for all; None for k = 0. worth: see `_worth_by_position`."""
    scenarios = _scenarios(problem)
    drafters = _best_drafters(worth.sum(axis=1), scenarios)
    values = _values(problem, drafters)
    best = int(values.argmax())  # the first of equal ones: without the neural draft, and the shortest
    scenario, draft_tokens = divmod(best, values.shape[1])
    value = float(values[scenario, draft_tokens])
    if draft_tokens == 0 or value - plain < least_gain:
        return None
    chosen = drafters[scenario]
    if len(worth) > 1 and draft_tokens < worth.shape[1]:
        # Who serves a request best may be another where the chain is shorter.
        chosen = _best_drafters(worth[:, :draft_tokens].sum(axis=1), scenarios[scenario : scenario + 1])[0]
    neural_tokens = draft_tokens if (chosen == problem.neural).any() and problem.neural != NOBODY else 0
    return DraftChoice(draft_tokens, neural_tokens, chosen, value, plain, problem.pressure is not None)


def _with_paying(problem: DraftProblem, choice: DraftChoice) -> DraftChoice:
    """`choice` with the proposals that pay beyond the knee, and those that pay before it."""
    ragged = problem.price.ragged
    before = problem.query_costs_s + (problem.neural_token_s if choice.neural_tokens else 0.0)
    before = before + ragged.per_batched_token_s
    beyond = before + ragged.per_batched_token_above_knee_s
    surely, perhaps = ((problem.gains > problem.rate * each).sum(axis=1) for each in (beyond, before))
    return replace(choice, paying=surely, perhaps_paying=perhaps)


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
    cost = price.ragged.token_s(price.n_batched)
    spent = np.full((len(problem.gains), 1, 1), problem.rate * cost, dtype=problem.gains.dtype)
    if problem.neural != NOBODY:
        spent[problem.neural] += problem.rate * problem.neural_token_s
    if problem.query_costs_s.any():
        spent = spent + problem.rate * problem.query_costs_s  # (D, 1, N)
    worth = np.maximum(problem.gains - spent, 0.0)
    if problem.pressure is not None:
        worth[:, :, problem.pressure.behind] = problem.gains[:, :, problem.pressure.behind]  # at any cost
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
    """(S, K+1): worth of each draft length with these drafters (S, N), the drafts' own time included; -inf where
    requests behind their TPOT would be left shorter than need be."""
    gains, offers = _of_chosen(problem.gains, drafters), _of_chosen(problem.offers, drafters)
    offers = offers * (drafters != NOBODY)[:, None]
    used = (drafters[:, None] == np.arange(len(problem.gains))[:, None]).any(axis=2)  # (S, D)
    costs = problem.query_costs_s + problem.neural_token_s * used[:, problem.neural, None]  # (S, N)
    forced = None if problem.pressure is None else _forced(problem, problem.pressure, gains * offers)
    values = values_by_draft_length(gains, offers, costs, problem.price, problem.rate, problem.budget, forced)
    draft_s = used @ problem.draft_s  # (S, K+1); column 0 is that of k = 0
    values[:, 1:] -= problem.rate * draft_s[:, 1:]
    if problem.pressure is not None and forced is not None:
        short = _shortfalls(problem, problem.pressure, gains * offers, forced, draft_s)
        bound = short.min() + EQUAL_SHORTFALL * problem.pressure.behind.sum()
        values[short > bound] = -np.inf
    return values


def _forced(problem: DraftProblem, pressure: Pressure, gains: Floats) -> Bools:
    """(S, K, N): positions that requests behind their TPOT are to verify, from what they may gain, (S, K, N)."""
    lengths = np.stack([
        forced_lengths(pressure.clocks, pressure.behind, pressure.step_s, each, problem.price, problem.budget)
        for each in gains
    ])  # (S, N)  # fmt: skip
    return np.asarray(np.arange(gains.shape[1])[:, None] < lengths[:, None])


def _shortfalls(problem: DraftProblem, pressure: Pressure, gains: Floats, forced: Bools, draft_s: Floats) -> Floats:
    """(S, K+1): tokens that those behind lack in all. What goodput asks for beside them makes the step longer."""
    verified = forced | (gains > problem.rate * problem.price.token_s())
    tokens = verified.sum(axis=2).cumsum(axis=1)  # (S, K)
    step_s = draft_s + problem.price.plain_s()
    step_s[:, 1:] = draft_s[:, 1:] + problem.price.ragged_s(tokens.astype(float))
    gained = np.ones((len(gains), gains.shape[1] + 1, gains.shape[2]))  # the bonus token
    gained[:, 1:] += (gains * verified).cumsum(axis=1)
    short = [
        shortfalls(pressure.clocks, pressure.behind, *each) for each in zip(gained, step_s, strict=True)
    ]  # fmt: skip
    return np.stack(short)


def _of_chosen(values: Floats, drafters: Ints) -> Floats:
    """(S, K, N): of `values` (D, K, N) those of each request's drafter, (S, N); anything where it has none."""
    chosen = np.broadcast_to(values[0], (len(drafters), *values.shape[1:]))
    for number in range(1, len(values)):
        chosen = np.where((drafters == number)[:, None], values[number], chosen)
    return chosen
