"""SLO first: AdaServe's SLO-customised selection (section 4.3, algorithm 2), on chains and trees.

A request must gain `A(r) = (elapsed + t_step) / TPOT - tokens so far` tokens in a step to be on time at its end. Both
count from the first token (TPOT does), so a request that is exactly on time before a step of one TPOT needs 1, which
the bonus token gives. One that needs more is behind: the fewest of its nodes that are expected to give as much are
scored before goodput is asked. N requests, M nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.batch import Batch, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.drafters import MOST_FORCED
from outrider_runtime.control.value import Price

MOST_BEHIND, MOST_LOSS = 0.5, 0.05
"""Where those behind are more of the batch than this, serving them first may cost that share of a step's goodput: for
everybody at once it would make all of them later still."""
MARGIN = 0.95
"""A step is planned to end this share of a TPOT in time: steps vary, and so does what is accepted."""
HORIZON_TOKENS = 64
"""Few answers use all of max_tokens: what is left is taken to be no longer than what was given, or than this."""


def expected_rest(left: Floats, given: Floats) -> Floats:
    """(N,): tokens that answers are taken to go on for, of `left` that they may have; `given`: so far."""
    return np.asarray(np.minimum(left, np.maximum(given, HORIZON_TOKENS)))


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
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

    def slack_s(self, step_s: float | Floats, pace: Floats) -> Floats:
        """(N,): by how many seconds a request would end before its TPOT, if each step gives `pace` (N,) tokens."""
        horizon = expected_rest(self.left, self.tokens)
        return np.asarray(self.tpot_s * (self.tokens + horizon) - self.elapsed_s - step_s * horizon / pace)

    def savable(self, step_s: float | Floats, pace: Floats) -> Bools:
        """(N,): those that can still end within their TPOT."""
        return np.asarray(self.slack_s(step_s, pace) >= 0)

    def behind(self, step_s: float, pace: Floats) -> Bools:
        """(N,): those that need more than the bonus token and can still make it; the hopeless compete for goodput.
        pace: (N,), the most tokens that a step is expected to give."""
        late = self.needed(step_s) > 1.0
        return np.asarray(late & self.savable(step_s, pace)) if late.any() else late

    def longest_step_s(self, gained: Floats, least_s: float) -> float:
        """Seconds that a step which gives `gained` (N,) tokens may take so that nobody misses who would not miss a step
        of `least_s` as well; infinite when nobody does."""
        deadlines = self.tpot_s * (self.tokens + gained) - self.elapsed_s
        return float(deadlines[deadlines >= least_s].min(initial=math.inf))


def clocks(batch: Batch, rows: Ints, tpots_s: Floats) -> Clocks:
    """Of N `rows` of the batch. tpots_s: by class, the last one (infinite) for none."""
    planned_s = MARGIN * tpots_s[batch.slo_class[rows]]
    return Clocks(
        tpot_s=np.where(batch.emitted[rows] > 0, planned_s, math.inf),
        elapsed_s=batch.elapsed_s[rows],
        tokens=np.maximum(batch.emitted[rows] - 1.0, 0.0),
        left=batch.left[rows].astype(float),
    )


@compiled
def anyone_late(batch_class: Ints, elapsed_s: Floats, emitted: Ints, tpots_s: Floats, seconds: float) -> bool:
    """Whether somebody needs more than the bonus token within `seconds`. In nearly every step the answer is no."""
    for i in range(len(emitted)):
        if emitted[i] > 0 and elapsed_s[i] + seconds > MARGIN * tpots_s[batch_class[i]] * emitted[i]:
            return True
    return False


def is_crowd(who: Bools) -> bool:
    """Whether those behind, `who` (N,), are so many that serving them first must not cost more than MOST_LOSS."""
    return bool(who.mean() > MOST_BEHIND)


def forced_nodes(
    paths: Floats, request: Ints, who: Bools, needed: Floats, step_s: float, price: Price, budget: int
) -> Bools:  # fmt: skip
    """(M,): what those behind score before goodput is asked.

    A request's likeliest nodes, until it gets what it needs, after MOST_FORCED of them, or where a further one would
    slow the step by more than it brings the request itself. The slowest is served first where the budget does not hold
    all. who, needed: (N,).
    """
    order = np.lexsort((np.arange(len(paths)), -paths, -needed[request]))
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
