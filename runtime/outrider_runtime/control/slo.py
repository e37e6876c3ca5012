"""SLO first: AdaServe's SLO-customised selection (section 4.3, algorithm 2), on chains and trees.

A request must gain `A(r) = (elapsed + t_step) / TPOT - tokens so far` tokens in a step to be on time at its end. Both
count from the first token (TPOT does), so a request that is exactly on time before a step of one TPOT needs 1, which
the bonus token gives. One that needs more is behind: the fewest of its nodes that are expected to give as much are
scored before goodput is asked. N requests, M nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compilable, compiled
from outrider_runtime.control.data.batch import Bools, Columns, Floats, Ints
from outrider_runtime.control.value import Price

MOST_FORCED = 4
"""AdaServe's n_max: positions of one request that goodput has no say in."""
MARGIN = 0.95
"""A step is planned to end this share of a TPOT in time: steps vary, and so does what is accepted."""
HORIZON_TOKENS = 64
"""Few answers use all of max_tokens: what is left is taken to be no longer than what was given, or than this."""


@compilable
def expected_rest(left: Floats, given: Floats) -> Floats:
    """(N,): tokens that answers are taken to go on for, of `left` that they may have; `given`: so far."""
    return np.asarray(np.minimum(left, np.maximum(given, HORIZON_TOKENS)))


@compilable
def tpot_of(slo_class: int, tpots_s: Floats) -> float:
    """Seconds a token that a class tolerates; infinite for no class, and for one that a new config has removed.
    tpots_s: by class, the last one (infinite) for none."""
    return float(tpots_s[slo_class]) if slo_class < len(tpots_s) else np.inf


class Clocks(NamedTuple):
    """Where each decoding request stands against its class, when the step begins. All (N,)."""

    tpot_s: Floats
    """Infinite for a request without a class, or before its first token."""
    elapsed_s: Floats
    tokens: Floats
    """After its first one."""
    left: Floats


@compiled
def clocks(batch: Columns, rows: Ints, tpots_s: Floats) -> Clocks:
    """Of N `rows` of the batch. tpots_s: by class, the last one (infinite) for none."""
    tpot_s, elapsed_s, tokens, left = np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows))
    for n in range(len(rows)):
        i = rows[n]
        tpot_s[n] = MARGIN * tpot_of(batch.slo_class[i], tpots_s) if batch.emitted[i] > 0 else np.inf
        elapsed_s[n], tokens[n], left[n] = batch.elapsed_s[i], max(batch.emitted[i] - 1, 0), batch.left[i]
    return Clocks(tpot_s, elapsed_s, tokens, left)


@compiled
def needed(state: Clocks, step_s: float) -> Floats:
    """A(r): (N,), tokens that a step of `step_s` seconds must give; 0 or less for one that is ahead."""
    return np.asarray((state.elapsed_s + step_s) / state.tpot_s - state.tokens)


@compiled
def later(state: Clocks, step_s: float, gained: Floats) -> Clocks:
    """The same after a step that gave `gained` (N,) tokens."""
    return Clocks(state.tpot_s, state.elapsed_s + step_s, state.tokens + gained, state.left - gained)


@compiled
def slack_s(state: Clocks, token_s: Floats) -> Floats:
    """(N,): by how many seconds a request would end before its TPOT, if each token takes it `token_s` (N,)."""
    rest = expected_rest(state.left, state.tokens)
    return np.asarray(state.tpot_s * (state.tokens + rest) - state.elapsed_s - token_s * rest)


@compiled
def behind(state: Clocks, step_s: float, pace: Floats) -> Bools:
    """(N,): those that need more than the bonus token and can still make it; the hopeless compete for goodput.
    pace: (N,), the most tokens that a step is expected to give."""
    return np.asarray((needed(state, step_s) > 1.0) & (slack_s(state, step_s / pace) >= 0.0))


@compiled
def longest_step_s(state: Clocks, gained: Floats, least_s: float) -> float:
    """Seconds that a step which gives `gained` (N,) tokens may take so that nobody misses who would not miss a step
    of `least_s` as well; infinite when nobody does."""
    longest = np.inf
    for n in range(len(gained)):
        deadline = state.tpot_s[n] * (state.tokens[n] + gained[n]) - state.elapsed_s[n]
        if deadline >= least_s:
            longest = min(longest, deadline)
    return longest


class Need(NamedTuple):
    """Where each request stands against its TPOT as the next step begins. All (N,)."""

    behind: Bools
    """It needs more than the bonus token and can still make it."""
    tokens: Floats
    """Beyond the bonus token, for a step that takes no time."""
    per_s: Floats
    """And for each second of it."""


@compiled
def nobody_behind(requests: int) -> Need:
    nothing = np.zeros(requests)
    return Need(np.zeros(requests, np.bool_), nothing, nothing)


@compiled
def wanted(need: Need, step_s: float) -> Floats:
    """(N,): the tokens beyond the bonus token that a request must gain in a step, whatever goodput says; -inf for one
    that is not behind."""
    return np.where(need.behind, need.tokens + need.per_s * step_s, -np.inf)


@compiled
def shortfall(gains: Floats, need: Need, step_s: float) -> float:
    """Tokens that those behind lack after a step that gives `gains` (N,)."""
    short = 0.0
    for i in range(len(gains)):
        if need.behind[i]:
            short += max(0.0, need.tokens[i] + need.per_s[i] * step_s - gains[i])
    return short


@dataclass(slots=True, eq=False)
class UnderWay:
    """What the step under way is expected to give and to take; only where classes ask."""

    expected: Floats
    """(S,): tokens beyond the bonus token, by slot."""
    drafts_s: float = 0.0
    """Seconds of the drafts at the end of a step, if they go on as they did."""
    goodput: float = 1.0
    """Lambda / plain decoding's goodput that the proposals under way were chosen with; what is verified of them is
    chosen with the same one."""

    def verifies_nothing(self) -> None:
        """The step under way gives its bonus tokens alone."""
        self.expected.fill(0.0)


@compiled
def anyone_late(batch: Columns, tpots_s: Floats, seconds: float) -> bool:
    """Whether somebody needs more than the bonus token within `seconds`. In nearly every step the answer is no."""
    for i in range(len(batch.emitted)):
        own_s = MARGIN * tpot_of(batch.slo_class[i], tpots_s)
        if batch.emitted[i] > 0 and batch.elapsed_s[i] + seconds > own_s * batch.emitted[i]:
            return True
    return False


@compiled
def forced_nodes(
    paths: Floats, request: Ints, who: Bools, need: Floats, step_s: float, price: Price, budget: int
) -> Bools:
    """(M,): what those behind score before goodput is asked.

    A request's likeliest nodes, until it gets what it needs, after MOST_FORCED of them, or where a further one would
    slow the step by more than it brings the request itself. The slowest is served first where the budget does not hold
    all. who, need: (N,).
    """
    order = np.argsort(-paths, kind="mergesort")  # stable, as those that follow: the last one decides first
    order = order[np.argsort(request[order], kind="mergesort")]
    order = order[np.argsort(-need[request[order]], kind="mergesort")]
    forced = np.zeros(len(paths), np.bool_)
    gained, taken = np.ones(len(who)), np.zeros(len(who), np.int64)
    for m in order:
        i = request[m]
        helps = paths[m] * step_s > gained[i] * price.token_s
        if who[i] and helps and gained[i] < need[i] and taken[i] < MOST_FORCED and budget > 0:
            forced[m] = True
            gained[i] += paths[m]
            taken[i] += 1
            budget -= 1
    return forced
