"""Holding back prompts and new requests while a class with a tight TPOT decodes: a policy of its own, switchable.

A TPOT is a mean over the whole answer: what one step loses, those after it may make up. And a prompt that is read at
once delays everybody least, as each further step with a part of it costs more than one without. So a step takes as much
of the prompts as puts no TPOT out of reach, and always what lengthens it by a fifth. N decoding requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.model import Shape
from outrider_runtime.control.cost.step_times import Costs, decode_s, prompt_s
from outrider_runtime.control.data.batch import Columns, Floats
from outrider_runtime.control.slo import HORIZON_TOKENS, MARGIN, Clocks, expected_rest, later, slack_s, tpot_of

MOST_PATIENCE_USED = 1.0
"""Prompts are not held back once one has waited for this share of what its own class bears: where load stays high,
prompts that give way would queue up without end."""
LEAST_PROMPT_SHARE = 0.2
"""By this share of its time prompts may lengthen every step, however tight: one that is never read never starts."""
LARGE_CHUNK_TOKENS = 512
"""Where a token costs nothing that was measured."""
PARTS = 16
"""Of the room between the least chunk and the most, that are looked at."""
ADMISSIONS = (64, 16, 4, 1)
"""Numbers of requests whose start in one step is weighed; as many as the first are no burst to care about."""
LEAST_ANSWER_TOKENS = 16.0
"""Answers are taken to be no shorter: such short ones say nothing about those to come."""
ANY_NUMBER = -1
"""As many as the engine takes."""


class Queue(NamedTuple):
    """Who waits: `Batch.patience_used`, and the fields of its `Waiting`, if there is one."""

    admits: bool
    """Somebody may be held back."""
    someone: bool
    """Somebody waits to be let in."""
    patience_used: float
    slo_class: int
    prompt: int
    left: int
    overdue: bool


class Pace(NamedTuple):
    """How the requests that decode get on in a step without prompts."""

    clocks: Clocks
    base: Shape
    """Of the step, with neither proposals nor prompts."""
    proposals: float
    gained: Floats
    """(N,): tokens that each is expected to get."""
    drafts_s: float
    read_s: float
    """Of a prompt token in the first pass of the drafters that read it."""


@compiled
def token_budget(budget: int, queue: Queue, pace: Pace, costs: Costs) -> int:
    """Most tokens, of `budget`, that the step may batch so that its prompts break no TPOT; or ANY_NUMBER.

    Only who would not end in time any more limits the chunk, and not who could not even bear the smallest one.
    """
    own = int(pace.base.n_requests + pace.proposals)
    most = budget - own
    step_s = decode_s(costs, pace.base, pace.proposals)
    token_s = prompt_s(costs, pace.base, pace.proposals, 1.0)
    least = max(1, int(LEAST_PROMPT_SHARE * step_s / token_s)) if token_s > 0 else LARGE_CHUNK_TOKENS
    if queue.patience_used >= MOST_PATIENCE_USED or most <= least or not np.isfinite(pace.clocks.tpot_s).any():
        return ANY_NUMBER
    slack = slack_s(pace.clocks, (step_s + pace.drafts_s) / pace.gained)
    least_s, spare_s, room = _longer_s(costs, pace, float(least)), np.inf, least
    for n in range(len(slack)):
        if slack[n] >= least_s:
            spare_s = min(spare_s, slack[n])
    for part in range(PARTS + 1):
        chunk = np.floor(least + part / PARTS * (most - least))
        if _longer_s(costs, pace, chunk) <= spare_s:
            room = int(chunk)
    return ANY_NUMBER if room >= most else own + room


@compiled
def _longer_s(costs: Costs, pace: Pace, chunk: float) -> float:
    """Of a step with so many tokens of prompts."""
    return prompt_s(costs, pace.base, pace.proposals, chunk) + pace.read_s * chunk


@compiled
def admissions(batch: Columns, queue: Queue, pace: Pace, costs: Costs, tpots_s: Floats) -> int:
    """Most waiting requests that may start, taking them to be like the next one; or ANY_NUMBER.

    Where every token costs, a fuller batch is slower for all: beyond the size that its tightest class bears, all of
    them would be late instead of one waiting. An overdue request starts in any case, and so does one on an idle engine.
    A TPOT that not even a lone request could keep counts for nothing.
    """
    if not queue.someone:
        return ANY_NUMBER
    alone_s = decode_s(costs, Shape(0.0, 1.0, 1.0, 0.0, 0.0), 0.0) / _mean_pace(pace)
    tpots_s = np.where(MARGIN * tpots_s < alone_s, np.inf, tpots_s)
    tpot_s = tpot_of(queue.slo_class, tpots_s)
    for i in range(len(batch.slot)):
        if batch.prompt[i] + batch.prompt_left[i] > 0:
            tpot_s = min(tpot_s, tpot_of(batch.slo_class[i], tpots_s))
    for more in ADMISSIONS:
        if _fits(more, batch, queue, pace, costs, tpot_s):
            return ANY_NUMBER if more == ADMISSIONS[0] else more
    return int(len(batch.slot) == 0 or queue.overdue)


@compiled
def _fits(more: int, batch: Columns, queue: Queue, pace: Pace, costs: Costs, tpot_s: float) -> bool:
    """Nobody whose TPOT can be kept now loses it, and those who start can keep their own. The fuller batch's prompts to
    come count for both: in the life of one request each of the others ends and makes room for a prompt to be read."""
    reading = batch.prompt + batch.prompt_left
    now_s = decode_s(costs, pace.base, pace.proposals) + pace.drafts_s
    token_s = decode_s(costs, pace.base, pace.proposals + 2) - decode_s(costs, pace.base, pace.proposals + 1)
    then_s = now_s + ((reading > 0).sum() + more) * token_s
    unread_s = prompt_s(costs, pace.base, pace.proposals, float(reading.sum() + more * queue.prompt))
    one_s = prompt_s(costs, pace.base, pace.proposals, float(queue.prompt))
    turnover_s = (len(batch.slot) + more) * one_s / _answer_tokens(pace.clocks, queue.left)
    if then_s / _mean_pace(pace) + turnover_s > MARGIN * tpot_s:
        return False
    safe = slack_s(pace.clocks, now_s / pace.gained) >= 0.0
    delayed = later(pace.clocks, unread_s, np.zeros(len(safe)))
    return not (safe & (slack_s(delayed, then_s / pace.gained + turnover_s) < 0.0)).any()


@compiled
def _mean_pace(pace: Pace) -> float:
    """Tokens that a request gets in a step."""
    return float(pace.gained.mean()) if len(pace.gained) else 1.0


@compiled
def _answer_tokens(state: Clocks, left: int) -> float:
    """Mean length of the answers under way and the next one, as far as can be guessed."""
    every = (state.tokens + expected_rest(state.left, state.tokens)).sum() + min(left, HORIZON_TOKENS)
    return float(max(every / (1 + len(state.tokens)), LEAST_ANSWER_TOKENS))
