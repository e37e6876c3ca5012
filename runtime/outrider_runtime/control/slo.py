"""SLO first: AdaServe's SLO-customised selection (section 4.3, algorithm 2) on chains. Pure functions on arrays.

A request must gain `A(r) = (elapsed + t_step) / TPOT - tokens so far` tokens in a step to be on time at its end. Both
count from the first token (TPOT does), so a request that is exactly on time before a step of one TPOT needs 1, which
the bonus token gives. One that needs more is behind: the shortest prefix of its chain that is expected to give as
much is verified before goodput is asked. N requests, K positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.choice import TargetPrice

MOST_FORCED = 4
"""AdaServe's n_max: positions of one request that goodput has no say in."""
MOST_BEHIND = 0.5
MOST_LOSS = 0.05
"""Share of a step's goodput that serving those behind first may cost where they are more of the batch than that."""
MARGIN = 0.95
"""A step is planned to end this share of a TPOT in time: steps vary, and so does what is accepted."""
HORIZON_TOKENS = 64
"""Few answers use all of max_tokens: what is left is taken to be no longer than what was given, or than this."""
LEAST_PROMPT_SHARE = 0.2
"""By this share of its time prompts may lengthen every step, however tight: one that is never read never starts."""
LARGE_CHUNK_TOKENS = 512
"""Where a token costs nothing that was measured."""

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def expected_rest(left: Floats, given: Floats) -> Floats:
    """(N,): tokens that answers are taken to go on for, of `left` that they may have; `given`: so far."""
    return np.asarray(np.minimum(left, np.maximum(given, HORIZON_TOKENS)))


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where each decoding request stands against its class, when the step begins. All (N,)."""

    tpot_s: Floats
    """Infinite for a request without a class."""
    elapsed_s: Floats
    """Since its first token."""
    tokens: Floats
    """After its first one."""
    left: Floats
    """Tokens that it may still produce."""

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

    def within_reach(self, step_s: float | Floats, pace: Floats) -> Bools:
        """(N,): those that can still end within their TPOT."""
        return np.asarray(self.slack_s(step_s, pace) >= 0)

    def deadlines_s(self, gained: Floats) -> Floats:
        """(N,): how long a step that gives `gained` tokens may take."""
        return self.tpot_s * (self.tokens + gained) - self.elapsed_s


class Fuller(NamedTuple):
    """The batch with more requests in it."""

    now_s: float
    """Seconds of a step of the present batch."""
    then_s: float
    """Of the fuller one."""
    turnover_s: float
    """A token's share of as many prompts: in the life of one request each of the others ends and makes room."""

    def token_s(self, pace: float) -> float:
        """TPOT of one that starts now, if a step gives it `pace` tokens and the batch stays that full."""
        return self.then_s / pace + self.turnover_s


def clocks(
    slo_classes: Sequence[str | None], elapsed_s: Sequence[float], output_tokens: Sequence[int],
    remaining_tokens: Sequence[int], tpots_s: Mapping[str | None, float],
) -> Clocks | None:  # fmt: skip
    """None where no request has a class: then nobody can be behind."""
    if not tpots_s or tpots_s.keys().isdisjoint(slo_classes):
        return None
    # The clock starts with the first token.
    planned_s = [
        MARGIN * tpots_s.get(name, math.inf) if tokens else math.inf
        for name, tokens in zip(slo_classes, output_tokens, strict=True)
    ]
    return Clocks(
        tpot_s=np.array(planned_s),
        elapsed_s=np.array(elapsed_s, dtype=float),
        tokens=np.maximum(np.array(output_tokens, dtype=float) - 1.0, 0.0),
        left=np.array(remaining_tokens, dtype=float),
    )


def behind(state: Clocks, step_s: float, gains: Floats) -> Bools:
    """(N,): requests that need more than the bonus token and can still make it; hopeless ones compete for goodput."""
    late = state.needed(step_s) > 1.0
    if not late.any():
        return late
    return np.asarray(late & state.within_reach(step_s, 1.0 + gains[:MOST_FORCED].sum(axis=0)))


def is_crowd(who: Bools) -> bool:
    """Whether those behind, `who` (N,), are so many that serving them first must not cost more than MOST_LOSS.

    Few may have what they need: the others are in time. Below the knee it costs nothing (AdaServe's budget B); where
    every token has its price and most are behind, forcing for all would make all of them later still.
    """
    return bool(who.mean() > MOST_BEHIND)


def forced_lengths(
    state: Clocks, who: Bools, step_s: float, gains: Floats, price: TargetPrice, budget: int
) -> Ints:  # fmt: skip
    """(N,): positions that each of `who` verifies before goodput is asked.

    gains: (K, N), products of hazards. The prefix ends where the request gets what it needs (at most K+1), after
    MOST_FORCED positions, or where a further one would slow the step by more than it brings the request itself. The
    slowest is served first where the budget does not hold all.
    """
    candidates = gains[:MOST_FORCED]
    needed = np.minimum(state.needed(step_s), len(gains) + 1.0)
    before = 1.0 + candidates.cumsum(axis=0) - candidates  # (n_max, N) tokens without this position
    helps = candidates * step_s > before * price.token_s()
    lengths = (who & (candidates > 0) & (before < needed) & helps).sum(axis=0)
    return lengths if lengths.sum() <= budget else _slowest_first(lengths, needed, max(0, budget))


def _slowest_first(lengths: Ints, needed: Floats, budget: int) -> Ints:
    order = np.argsort(-needed, kind="stable")
    ordered = lengths[order]
    fitting = np.empty_like(lengths)
    fitting[order] = np.clip(budget - (ordered.cumsum() - ordered), 0, ordered)
    return fitting


def longest_step_s(state: Clocks, forced: Ints, gains: Floats, price: TargetPrice, draft_s: float) -> float:
    """Seconds that the target may take so that nobody whose positions are forced in misses for others' sake.

    Those who miss even if nothing but the forced positions is verified set no limit. Infinite when nobody does.
    """
    granted = gains * (np.arange(len(gains))[:, None] < forced)
    deadlines = state.deadlines_s(1.0 + granted.sum(axis=0)) - draft_s
    least = price.decode_s(int(forced.sum()))
    return float(deadlines[deadlines >= least].min(initial=math.inf))


def shortfalls(
    state: Clocks, who: Bools, gained: Floats, step_s: Floats
) -> Floats:  # fmt: skip
    """(K+1,): tokens that those behind lack in all, for each draft length.

    gained: (K+1, N), tokens they are expected to get; step_s: (K+1,).
    """
    lacking = (state.elapsed_s + step_s[:, None]) / state.tpot_s - state.tokens - gained
    return np.asarray((np.maximum(lacking, 0.0) * who).sum(axis=1))


def prompt_tokens(
    state: Clocks, gained: Floats, verified: int, price: TargetPrice, draft_s: float, draft_token_s: float, most: int
) -> int:  # fmt: skip
    """Prompt tokens that a step may take on so that no TPOT gets out of reach.

    A TPOT is a mean over the whole answer: what one step loses, those after it may make up. And a prompt that is read
    at once delays everybody least, as each further step with a part of it costs more than one without. So only who
    would not end in time any more limits the chunk, and not who could not even bear the smallest one.

    gained: (N,) tokens expected in the step. verified: proposals in it. price: of the batch without any prompt.
    draft_token_s: seconds of a prompt token in the draft's first pass. most: what fits into the step.
    """
    smallest = least_chunk(price, verified)
    if most <= smallest:
        return most
    chunks = np.unique(np.linspace(smallest, most, 65).astype(int))
    longer_s = price.prompt_s(verified, chunks.astype(float)) + draft_token_s * chunks
    slack_s = state.slack_s(price.decode_s(verified) + draft_s, gained)
    spare_s = float(slack_s[slack_s >= longer_s[0]].min(initial=math.inf))
    return int(chunks[max(0, int((longer_s <= spare_s).sum()) - 1)])


def has_room(
    state: Clocks | None, gained: Floats, fuller: Fuller, prompt_s: float, tpot_s: float
) -> bool:  # fmt: skip
    """Whether more requests may start: nobody whose TPOT can be kept now loses it, and they can keep their own. The
    fuller batch's prompts to come count for both, as whoever ends makes room for a prompt to be read.

    state: None where nobody who decodes has a class. gained: (N,) tokens that each request gains in a step. prompt_s:
    for reading their prompts. tpot_s: the least of their classes.
    """
    pace = float(gained.mean()) if len(gained) else 1.0
    if fuller.token_s(pace) > MARGIN * tpot_s:
        return False
    if state is None:
        return True
    safe = state.within_reach(fuller.now_s, gained)
    delayed = state.later(prompt_s, np.zeros(len(gained)))
    paced_s = fuller.then_s + fuller.turnover_s * gained  # (N,)
    return not (safe & ~delayed.within_reach(paced_s, gained)).any()


def least_chunk(price: TargetPrice, verified: int) -> int:
    """Prompt tokens that a step takes on in any case."""
    token_s = price.token_s()
    return max(1, int(LEAST_PROMPT_SHARE * price.decode_s(verified) / token_s)) if token_s > 0 else LARGE_CHUNK_TOKENS
