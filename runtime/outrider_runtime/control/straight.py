"""The joint choice of drafters and lengths where every verified token costs the same: exact, and without a search.

What a position is worth then depends on nothing but itself: its gain less its price, nothing where it does not pay.
Two lengths are free. A lookup is one call however long, so it is asked for all that pays. Each token of the neural
draft is a pass, so its length is weighed, alone and beside the lookups. Beside them its passes run for the whole batch,
so its proposals stand in wherever a lookup finds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.choice import uniform_values
from outrider_runtime.control.drafting import NOBODY, DraftChoice, DraftProblem

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class _Lookups:
    """What the lookups bring. Shapes: L lookups, K positions, N requests."""

    numbers: tuple[int, ...]
    worth: Floats
    """(L, K, N): of each position, 0 where it does not pay."""
    best: Floats
    """(N,): of all positions together, with the lookup that suits the request best."""
    chosen: NDArray[np.int64]
    """(N,): that lookup's drafter number."""
    misses: Floats
    """(N,): probability that it finds nothing."""

    def longest(self, served: NDArray[np.bool_]) -> int:
        """Positions that pay for any of `served` (N,)."""
        return int((self.worth[:, :, served] > 0).any(axis=(0, 2)).sum())


def choose_on_straight_cost(problem: DraftProblem, plain_value: float) -> DraftChoice | None:
    """The best of lookups alone, the neural drafter alone, and both; None where no speculation is worth more."""
    rate, price = problem.rate, problem.price
    net = problem.gains - rate * price.token_s()  # (D, K, N)
    if problem.query_costs_s.any():
        net = net - (rate * problem.query_costs_s).astype(net.dtype)
    start = -rate * price.ragged_plain_s()
    covered = net - rate * problem.neural_token_s  # where the neural draft's first pass covers every verified token
    options = [_lookups_alone(problem, net, plain_value, start)]
    if problem.neural != NOBODY and problem.usable[problem.neural].any():
        options += _with_neural(problem, covered, start)
    made = [option for option in options if option is not None]
    best = max(made, key=lambda option: option.value, default=None)  # the first of equal ones
    if best is None or best.value <= plain_value or best.draft_tokens == 0:
        return None
    paying = ((covered if best.neural_tokens else net) > 0).sum(axis=1) if best.paying is None else best.paying
    return replace(best, plain_value=plain_value, paying=paying)


def _lookups_alone(problem: DraftProblem, net: Floats, plain_value: float, start: float) -> DraftChoice | None:
    lookups = _lookups(problem, net)
    if lookups is None or not (lookups.best > 0).any():
        return None
    served, worth = _worth_asking(lookups, plain_value - start)
    value = plain_value + worth - problem.rate * _lookups_s(problem, lookups)
    return DraftChoice(lookups.longest(served), 0, np.where(served, lookups.chosen, NOBODY), value, plain_value)


def _worth_asking(lookups: _Lookups, loss: float) -> tuple[NDArray[np.bool_], float]:
    """(N,): whose lookups to ask, and what they bring in all. `loss`: what any step that verifies costs beyond a plain
    one; a step in which nothing is found is plain.

    A request is worth asking if what it brings when something is found is more than the loss, times the probability
    that nobody else finds anything: so the best set is those that bring the most, down to one of them."""
    paying = np.flatnonzero(lookups.best > 0)
    if_found = lookups.best[paying] / (1.0 - lookups.misses[paying])
    order = paying[np.argsort(-if_found, kind="stable")]
    totals = lookups.best[order].cumsum() - loss * (1.0 - lookups.misses[order].cumprod())
    last = int(totals.argmax())
    served = np.zeros(len(lookups.best), dtype=bool)
    served[order[: last + 1]] = True
    return served, float(totals[last])


def _with_neural(problem: DraftProblem, net: Floats, start: float) -> list[DraftChoice | None]:
    """The neural drafter alone, in equal lengths where that has a price of its own, and beside the lookups."""
    neural = problem.neural
    passes_s = problem.draft_s[neural, 1:]
    worth = np.maximum(net[neural], 0.0) * (problem.offers[neural] * problem.usable[neural])
    grown = worth.cumsum(axis=0)  # (K, N): of the first j positions
    return [
        _alone(problem, grown, passes_s, start),
        _uniform(problem, net[neural], passes_s),
        _beside(problem, _lookups(problem, net), grown, passes_s, start),
    ]


def _alone(problem: DraftProblem, grown: Floats, passes_s: Floats, start: float) -> DraftChoice:
    values = grown.sum(axis=1) - problem.rate * passes_s
    longest = int(values.argmax())
    drafters = np.where(grown[longest] > 0, problem.neural, NOBODY)
    return DraftChoice(longest + 1, longest + 1, drafters, start + float(values[longest]), start)


def _uniform(problem: DraftProblem, net: Floats, passes_s: Floats) -> DraftChoice | None:
    price, neural = problem.price, problem.neural
    if price.uniform is None or price.uniform is price.ragged or not problem.usable[neural].all():
        return None
    # What equal lengths cost is in the price of a whole step: the worth of a token leaves it out.
    scores = net + problem.rate * price.token_s()
    values = uniform_values(
        scores, problem.gains[neural], problem.offers[neural], price, problem.rate, problem.budget
    ) - problem.rate * passes_s  # fmt: skip
    longest = int(values.argmax())
    everyone = np.full(problem.usable.shape[1], neural)
    return DraftChoice(
        longest + 1, longest + 1, everyone, float(values[longest]), 0.0,
        paying=np.full(problem.usable.shape, longest + 1),
    )  # fmt: skip


def _beside(
    problem: DraftProblem, lookups: _Lookups | None, grown: Floats, passes_s: Floats, start: float
) -> DraftChoice | None:
    if lookups is None:
        return None
    looked = lookups.best + lookups.misses * grown  # (K, N): the lookup first, the neural drafter where it fails
    values = np.maximum(looked, grown).sum(axis=1) - problem.rate * passes_s
    passes = int(values.argmax())
    first = lookups.numbers[0] < problem.neural  # the pool's order breaks ties
    ahead = looked[passes] >= grown[passes] if first else looked[passes] > grown[passes]
    looked_up = ahead & (lookups.best > 0)
    drafters = np.where(looked_up, lookups.chosen, np.where(grown[passes] > 0, problem.neural, NOBODY))
    value = start + float(values[passes]) - problem.rate * _lookups_s(problem, lookups)
    return DraftChoice(max(passes + 1, lookups.longest(looked_up)), passes + 1, drafters, value, start)


def _lookups(problem: DraftProblem, net: Floats) -> _Lookups | None:
    numbers = [number for number in range(len(net)) if number != problem.neural and problem.usable[number].any()]
    if not numbers:
        return None
    worth = np.maximum(net[numbers], 0.0) * (problem.offers[numbers] * problem.usable[numbers, None])
    totals = worth.sum(axis=1)  # (L, N)
    chosen = np.array(numbers)[totals.argmax(axis=0)]
    requests = np.arange(len(chosen))
    misses = 1.0 - problem.offers[chosen, 0, requests] * problem.usable[chosen, requests]
    return _Lookups(tuple(numbers), worth, totals.max(axis=0), chosen, misses)


def _lookups_s(problem: DraftProblem, lookups: _Lookups) -> float:
    """Seconds of the lookups' calls; several of them are taken to be used all."""
    return float(problem.draft_s[list(lookups.numbers), -1].sum())
