"""SLO first: AdaServe's SLO-customised selection (section 4.3, algorithm 2), on chains and trees.

A request must gain `A(r) = (elapsed + t_step) / TPOT - tokens so far` tokens in a step to be on time at its end. Both
count from the first token (TPOT does), so a request that is exactly on time before a step of one TPOT needs 1, which
the bonus token gives. One that needs more is behind: the fewest of its nodes that are expected to give as much are
scored before goodput is asked. N requests, M nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Batch, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.drafters import MOST_FORCED
from outrider_runtime.control.value import Price

MARGIN = 0.95
"""A step is planned to end this share of a TPOT in time: steps vary, and so does what is accepted."""
HORIZON_TOKENS = 64
"""Few answers use all of max_tokens: what is left is taken to be no longer than what was given, or than this."""


@compiled
def expected_rest(left: Floats, given: Floats) -> Floats:
    """(N,): tokens that answers are taken to go on for, of `left` that they may have; `given`: so far."""
    return np.asarray(np.minimum(left, np.maximum(given, HORIZON_TOKENS)))


class Clocks(NamedTuple):
    """Where each decoding request stands against its class, when the step begins. All (N,)."""

    tpot_s: Floats
    """Infinite for a request without a class, or before its first token."""
    elapsed_s: Floats
    tokens: Floats
    """After its first one."""
    left: Floats

    def needed(self, step_s: float) -> Floats:
        """A(r): (N,), tokens that a step of `step_s` seconds must give; 0 or less for one that is ahead."""
        return (self.elapsed_s + step_s) / self.tpot_s - self.tokens

    def later(self, step_s: float, gained: Floats) -> Clocks:
        """The same after a step that gave `gained` (N,) tokens."""
        return Clocks(self.tpot_s, self.elapsed_s + step_s, self.tokens + gained, self.left - gained)

    def slack_s(self, token_s: Floats) -> Floats:
        """(N,): by how many seconds a request would end before its TPOT, if each token takes it `token_s` (N,)."""
        return _slack_s(self.tpot_s, self.elapsed_s, self.tokens, self.left, token_s)

    def savable(self, token_s: Floats) -> Bools:
        """(N,): those that can still end within their TPOT."""
        return np.asarray(self.slack_s(token_s) >= 0)

    def behind(self, step_s: float, pace: Floats) -> Bools:
        """(N,): those that need more than the bonus token and can still make it; the hopeless compete for goodput.
        pace: (N,), the most tokens that a step is expected to give."""
        late = self.needed(step_s) > 1.0
        return np.asarray(late & self.savable(step_s / pace)) if late.any() else late

    def longest_step_s(self, gained: Floats, least_s: float) -> float:
        """Seconds that a step which gives `gained` (N,) tokens may take so that nobody misses who would not miss a step
        of `least_s` as well; infinite when nobody does."""
        deadlines = self.tpot_s * (self.tokens + gained) - self.elapsed_s
        return float(deadlines[deadlines >= least_s].min(initial=math.inf))


@compiled
def _slack_s(tpot_s: Floats, elapsed_s: Floats, tokens: Floats, left: Floats, token_s: Floats) -> Floats:
    rest = expected_rest(left, tokens)
    return tpot_s * (tokens + rest) - elapsed_s - token_s * rest


@dataclass(slots=True, eq=False)
class UnderWay:
    """What the step under way is expected to give and to take; only where classes ask."""

    expected: Floats
    """(S,): tokens beyond the bonus token, by slot."""
    drafts_s: float = 0.0
    """Seconds of the drafts at the end of a step, if they go on as they did."""


def clocks(batch: Batch, rows: Ints, tpots_s: Floats) -> Clocks:
    """Of N `rows` of the batch. tpots_s: by class, the last one (infinite) for none."""
    return Clocks(*_clocks(batch.slo_class, batch.emitted, batch.elapsed_s, batch.left, rows, tpots_s))


@compiled
def _clocks(
    slo_class: Ints, emitted: Ints, elapsed_s: Floats, left: Ints, rows: Ints, tpots_s: Floats
) -> tuple[Floats, Floats, Floats, Floats]:  # fmt: skip
    columns = np.empty((4, len(rows)))
    for n in range(len(rows)):
        i = rows[n]
        columns[0, n] = MARGIN * tpots_s[slo_class[i]] if emitted[i] > 0 else np.inf
        columns[1, n], columns[2, n], columns[3, n] = elapsed_s[i], max(emitted[i] - 1, 0), left[i]
    return columns[0], columns[1], columns[2], columns[3]


@compiled
def anyone_late(batch_class: Ints, elapsed_s: Floats, emitted: Ints, tpots_s: Floats, seconds: float) -> bool:
    """Whether somebody needs more than the bonus token within `seconds`. In nearly every step the answer is no."""
    for i in range(len(emitted)):
        if emitted[i] > 0 and elapsed_s[i] + seconds > MARGIN * tpots_s[batch_class[i]] * emitted[i]:
            return True
    return False


def forced_nodes(
    paths: Floats, request: Ints, who: Bools, needed: Floats, step_s: float, price: Price, budget: int
) -> Bools:  # fmt: skip
    """(M,): what those behind score before goodput is asked.

    A request's likeliest nodes, until it gets what it needs, after MOST_FORCED of them, or where a further one would
    slow the step by more than it brings the request itself. The slowest is served first where the budget does not hold
    all. who, needed: (N,).
    """
    order = np.lexsort((np.arange(len(paths)), -paths, request, -needed[request]))
    return _force(order, paths, request, who, needed, step_s, price.token_s, budget)


@compiled
def _force(
    order: Ints, paths: Floats, request: Ints, who: Bools, needed: Floats, step_s: float, token_s: float, budget: int
) -> Bools:  # fmt: skip
    forced = np.zeros(len(paths), np.bool_)
    gained, taken = np.ones(len(who)), np.zeros(len(who), np.int64)
    for m in order:
        i = request[m]
        helps = paths[m] * step_s > gained[i] * token_s
        if who[i] and helps and gained[i] < needed[i] and taken[i] < MOST_FORCED and budget > 0:
            forced[m] = True
            gained[i] += paths[m]
            taken[i] += 1
            budget -= 1
    return forced
