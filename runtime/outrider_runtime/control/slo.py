"""SLO first: AdaServe's SLO-customised selection (section 4.3, algorithm 2), on chains and trees.

A request must gain `A(r) = (elapsed + t_step) / TPOT - tokens so far` tokens in a step to be on time at its end.
Elapsed time and tokens count from the first token, as TPOT does: a request that is exactly on time before a step of one
TPOT needs 1 token, which the bonus token gives. A request that needs more is late (`behind`). The fewest of its nodes
that are expected to give what it needs are then scored, whatever they do to goodput. N requests, M nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Bools, Columns, Floats, Ints
from outrider_runtime.control.compiled import compilable, compiled
from outrider_runtime.control.value import Price

MOST_FORCED = 4
"""AdaServe's n_max: most nodes of one request that are scored whatever they do to goodput."""
MARGIN = 0.95
"""Planned TPOT / the class's TPOT: steps vary, and so does what is accepted."""
HORIZON_TOKENS = 64
"""Few answers use all of max_tokens: the rest of an answer is assumed to be no longer than the answer so far, or than
this."""


@compilable
def expected_rest(left: Floats, emitted: Floats) -> Floats:
    """(N,): tokens that answers are assumed to go on for: `min(left, max(emitted, HORIZON_TOKENS))`.

    left: tokens that they may still produce. emitted: tokens so far.
    """
    return np.asarray(np.minimum(left, np.maximum(emitted, HORIZON_TOKENS)))


@compilable
def tpot_of(slo_class: int, tpots_s: Floats) -> float:
    """Seconds per token that a class tolerates; infinite without a class, and for a class that a new config has
    removed. tpots_s: seconds per token of each class, the last one (infinite) for requests without a class."""
    return float(tpots_s[slo_class]) if slo_class < len(tpots_s) else np.inf


class Clocks(NamedTuple):
    """Each decoding request's time and tokens since its first token, as the step begins. All (N,)."""

    tpot_s: Floats
    """Planned seconds per token (`MARGIN`); infinite for a request without a class, or before its first token."""
    elapsed_s: Floats
    """Seconds since its first token."""
    tokens: Floats
    """Tokens after its first one."""
    left: Floats
    """Tokens that it may still produce."""


@compiled
def clocks(batch: Columns, rows: Ints, tpots_s: Floats) -> Clocks:
    """The clocks of N `rows` of the batch. tpots_s: seconds per token of each class, the last one (infinite) for
    requests without a class."""
    tpot_s, elapsed_s, tokens, left = np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows))
    for n in range(len(rows)):
        i = rows[n]
        tpot_s[n] = MARGIN * tpot_of(batch.slo_class[i], tpots_s) if batch.emitted[i] > 0 else np.inf
        elapsed_s[n], tokens[n], left[n] = batch.elapsed_s[i], max(batch.emitted[i] - 1, 0), batch.left[i]
    return Clocks(tpot_s, elapsed_s, tokens, left)


@compiled
def needed(state: Clocks, step_s: float) -> Floats:
    """A(r): (N,), tokens that each request must gain in a step of `step_s` seconds; 0 or less for one that is ahead."""
    return np.asarray((state.elapsed_s + step_s) / state.tpot_s - state.tokens)


@compiled
def later(state: Clocks, step_s: float, gained: Floats) -> Clocks:
    """The clocks after a step of `step_s` seconds that gave `gained` (N,) tokens."""
    return Clocks(state.tpot_s, state.elapsed_s + step_s, state.tokens + gained, state.left - gained)


@compiled
def slack_s(state: Clocks, token_s: Floats) -> Floats:
    """(N,): seconds that each answer would end early by, against its TPOT, at `token_s` (N,) seconds per token:

    TPOT * (tokens + rest) - elapsed - token_s * rest
    """
    rest = expected_rest(state.left, state.tokens)
    return np.asarray(state.tpot_s * (state.tokens + rest) - state.elapsed_s - token_s * rest)


@compiled
def behind(state: Clocks, step_s: float, pace: Floats) -> Bools:
    """(N,): late requests: they need more than the bonus token and can still meet their TPOT. Those that no longer can
    are drafted for by goodput alone. pace: (N,), the most tokens that a step is expected to give."""
    return np.asarray((needed(state, step_s) > 1.0) & (slack_s(state, step_s / pace) >= 0.0))


@compiled
def longest_step_s(state: Clocks, gained: Floats, least_s: float) -> float:
    """Most seconds of a step that gives `gained` (N,) tokens such that no request misses its TPOT, apart from requests
    that would miss it even in a step of `least_s`; infinite if no request has a TPOT to miss."""
    longest = np.inf
    for n in range(len(gained)):
        deadline = state.tpot_s[n] * (state.tokens[n] + gained[n]) - state.elapsed_s[n]
        if deadline >= least_s:
            longest = min(longest, deadline)
    return longest


class Need(NamedTuple):
    """Tokens that each request needs in the next step to meet its TPOT, `tokens + per_s * step_s`. All (N,)."""

    behind: Bools
    """It is late: it needs more than the bonus token and can still meet its TPOT."""
    tokens: Floats
    """Tokens needed beyond the bonus token, for a step that takes no time."""
    per_s: Floats
    """Further tokens needed for each second of the step."""


@compiled
def none_behind(requests: int) -> Need:
    nothing = np.zeros(requests)
    return Need(np.zeros(requests, np.bool_), nothing, nothing)


@compiled
def least_gains(need: Need, step_s: float) -> Floats:
    """(N,): tokens beyond the bonus token that a late request must gain in a step of `step_s` seconds, whatever that
    does to goodput; -inf for a request that is not late."""
    return np.where(need.behind, need.tokens + need.per_s * step_s, -np.inf)


@compiled
def shortfall(gains: Floats, need: Need, step_s: float) -> float:
    """Tokens that the late requests still lack, in all, after a step that gives `gains` (N,)."""
    short = 0.0
    for i in range(len(gains)):
        if need.behind[i]:
            short += max(0.0, need.tokens[i] + need.per_s[i] * step_s - gains[i])
    return short


@dataclass(slots=True, eq=False)
class UnderWay:
    """Expected tokens and seconds of the step under way. Kept only where SLO classes need them."""

    expected: Floats
    """(S,): expected tokens beyond the bonus token, by slot."""
    drafts_s: float = 0.0
    """Seconds of the drafts at the end of a step, as last planned."""
    lambda_over_plain: float = 1.0
    """Lambda / modelled goodput of plain decoding, as used to choose the proposals under way. Which of them are
    verified is chosen with the same value."""

    def verifies_nothing(self) -> None:
        """The step under way gives its bonus tokens alone."""
        self.expected.fill(0.0)


@compiled
def anyone_late(batch: Columns, tpots_s: Floats, seconds: float) -> bool:
    """Whether some request needs more than the bonus token within `seconds`. In nearly every step the answer is no."""
    for i in range(len(batch.emitted)):
        own_s = MARGIN * tpot_of(batch.slo_class[i], tpots_s)
        if batch.emitted[i] > 0 and batch.elapsed_s[i] + seconds > own_s * batch.emitted[i]:
            return True
    return False


@compiled
def forced_nodes(
    paths: Floats, request: Ints, late: Bools, need: Floats, step_s: float, price: Price, budget: int
) -> Bools:
    """(M,): nodes of late requests that are scored whatever they do to goodput.

    A late request gets its likeliest nodes until they are expected to give what it needs. It gets at most MOST_FORCED,
    and none that would slow the step by more than it brings the request itself. If the budget does not hold all, the
    request with the largest need is served first. late, need: (N,).
    """
    order = np.argsort(-paths, kind="mergesort")  # stable, as those that follow: the last one decides first
    order = order[np.argsort(request[order], kind="mergesort")]
    order = order[np.argsort(-need[request[order]], kind="mergesort")]
    forced = np.zeros(len(paths), np.bool_)
    gained, taken = np.ones(len(late)), np.zeros(len(late), np.int64)
    for m in order:
        i = request[m]
        helps = paths[m] * step_s > gained[i] * price.token_s
        if late[i] and helps and gained[i] < need[i] and taken[i] < MOST_FORCED and budget > 0:
            forced[m] = True
            gained[i] += paths[m]
            taken[i] += 1
            budget -= 1
    return forced
