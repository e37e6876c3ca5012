"""Lookups first, the neural draft behind them, where the price of a verified token bends.

What lies beyond a bend costs more for everybody, so no position's worth stands alone. But each proposal is verified as
often as it is there: a request is looked at as two, one with its lookup's proposals, and one with the neural draft's as
often as the lookup finds nothing. Then the best verification of every number of passes is found as for any proposals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.choice import values_by_draft_length
from outrider_runtime.control.drafting import NOBODY, DraftChoice, DraftProblem

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]


def choose_lookups_first(problem: DraftProblem, worth: Floats, plain_value: float) -> DraftChoice | None:
    """The best number of passes of the neural draft beside the lookups; None where there are not both.

    worth: (D, K, N), what each position brings at the price of the next token, 0 where it does not pay.
    """
    neural = problem.neural
    if neural == NOBODY or len(worth) == 1 or not problem.usable[neural].any():
        return None
    totals = worth.sum(axis=1) * problem.usable  # (D, N)
    totals[neural] = 0.0
    chosen = totals.argmax(axis=0)
    requests = np.arange(len(chosen))
    looks_up = _ahead(problem, worth, chosen, totals[chosen, requests])  # (J, N)
    if not looks_up.any():
        return None
    lookup_gains, lookup_offers = problem.gains[chosen, :, requests].T, problem.offers[chosen, :, requests].T
    values = _values(problem, lookup_gains, lookup_offers, looks_up)
    values -= problem.rate * _lookups_s(problem, chosen, looks_up)
    best = int(values.argmax())
    served = looks_up[best]
    behind = (worth[neural].sum(axis=0) > 0) & problem.usable[neural]
    drafters = np.where(served, chosen, np.where(behind, neural, NOBODY))
    longest = int((worth[chosen, :, requests].T[:, served] > 0).any(axis=1).sum())
    return DraftChoice(max(best + 1, longest), best + 1, drafters, float(values[best]), plain_value)


def _ahead(problem: DraftProblem, worth: Floats, chosen: NDArray[np.int64], totals: Floats) -> Bools:
    """(J, N): beside a neural draft of 1, 2, .. J tokens, whose lookup brings more when it finds something."""
    found = problem.offers[chosen, 0, np.arange(len(chosen))]
    behind = (worth[problem.neural] * problem.usable[problem.neural]).cumsum(axis=0)
    return np.asarray((totals > 0) & (totals >= found * behind))


def _values(problem: DraftProblem, lookup_gains: Floats, lookup_offers: Floats, looks_up: Bools) -> Floats:
    """(J,): of the neural draft's passes, 1 to J, with the lookups' proposals, (K, N), where they go first, (J, N)."""
    neural, passes = problem.neural, len(looks_up)
    first = lookup_offers * looks_up[:, None]  # (J, K, N)
    proposed = np.tri(passes, dtype=bool)[:, :, None] * (problem.offers[neural] * problem.usable[neural])
    behind = proposed * (1.0 - first[:, :1])
    gains = np.concatenate([lookup_gains, problem.gains[neural]], axis=1)  # (K, 2N)
    costs = np.tile(problem.query_costs_s + problem.neural_token_s, (passes, 2))
    values = values_by_draft_length(
        np.broadcast_to(gains, (passes, *gains.shape)), np.concatenate([first, behind], axis=2), costs, problem.price,
        problem.rate, problem.budget,
    )  # fmt: skip
    return np.asarray(values[:, -1] - problem.rate * problem.draft_s[neural, 1:])


def _lookups_s(problem: DraftProblem, chosen: NDArray[np.int64], looks_up: Bools) -> Floats:
    """(J,): seconds of the calls of all lookups that are asked."""
    numbers = np.arange(len(problem.gains))[:, None, None]
    asked = ((chosen == numbers) & looks_up).any(axis=2)  # (D, J)
    return np.asarray(problem.draft_s[:, -1] @ asked)
