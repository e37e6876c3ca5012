"""Holding back prompts and new requests while a class with a tight TPOT decodes: a separate policy, which can be
switched off.

TPOT is a mean over the whole answer, so later steps may make up for a slow one. And a prefill in one step delays the
other requests least, since every step with a chunk of it costs extra. So a step takes the largest chunk that puts no
TPOT out of reach, and always one that lengthens the step by a fifth. N decoding requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Columns, Floats
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.slo import HORIZON_TOKENS, MARGIN, Clocks, expected_rest, later, slack_s, tpot_of
from outrider_runtime.control.step_times import Costs, Shape, decode_s, prompt_s

MOST_PATIENCE_USED = 1.0
"""Time waited / the time that the class tolerates, from which on prompts are not held back: under lasting load, prompts
that give way would queue up without end."""
LEAST_PROMPT_SHARE = 0.2
"""Share of its time by which prompts may lengthen any step, however tight the TPOTs: without prefill no request ever
starts."""
LARGE_CHUNK_TOKENS = 512
"""The smallest chunk if, as far as measured, a token costs nothing."""
CHUNK_SIZE_STEPS = 16
"""Chunk sizes tried between the smallest chunk and the budget."""
ADMISSIONS = (64, 16, 4, 1)
"""Numbers of requests whose start in one step is weighed. If 64 may start, any number may."""
LEAST_ANSWER_TOKENS = 16.0
"""Answers are assumed to be no shorter: shorter ones say nothing about those to come."""
ANY_NUMBER = -1
"""No limit: as many as the engine takes."""


class Queue(NamedTuple):
    """What waits: `Batch.patience_used`, and the fields of the batch's `Waiting`, if there is one."""

    admits: bool
    """Admission is on: prompts and requests may be held back."""
    has_waiting: bool
    """A request waits to start."""
    patience_used: float
    slo_class: int
    prompt: int
    left: int
    overdue: bool


class Pace(NamedTuple):
    """Tokens and time of the decoding requests in a step without prompts."""

    clocks: Clocks
    base: Shape
    """The step's pass without proposals and prompts."""
    proposals: float
    gained: Floats
    """(N,): tokens that each request is expected to get."""
    drafts_s: float
    """Seconds of the drafts."""
    read_s: float
    """Seconds that a prompt token adds to the first passes of the drafters that are fed it."""


@compiled
def token_budget(budget: int, queue: Queue, pace: Pace, costs: Costs) -> int:
    """Most tokens, up to `budget`, that the step may batch so that its prompts break no TPOT; or ANY_NUMBER.

    Only requests that this chunk would make late limit its size. Those that even the smallest chunk makes late do not.
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
    for part in range(CHUNK_SIZE_STEPS + 1):
        chunk = np.floor(least + part / CHUNK_SIZE_STEPS * (most - least))
        if _longer_s(costs, pace, chunk) <= spare_s:
            room = int(chunk)
    return ANY_NUMBER if room >= most else own + room


@compiled
def _longer_s(costs: Costs, pace: Pace, chunk: float) -> float:
    """Seconds that a chunk of `chunk` prompt tokens adds to the step, drafters included."""
    return prompt_s(costs, pace.base, pace.proposals, chunk) + pace.read_s * chunk


@compiled
def admissions(batch: Columns, queue: Queue, pace: Pace, costs: Costs, tpots_s: Floats) -> int:
    """Most waiting requests that may start, assuming that they are like the next one; or ANY_NUMBER.

    If every token costs time, a fuller batch is slower for all: beyond the size that its tightest class tolerates,
    every request would be late instead of one waiting. An overdue request starts in any case, and so does one on an
    idle engine. A TPOT that even a single request could not meet is ignored."""
    if not queue.has_waiting:
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
    """Whether `more` requests can start so that they meet their TPOT and no running request that meets its own misses
    it.

    Later prompts of the fuller batch count too: while one request lives, each of the others ends and is replaced by a
    request with a prefill.
    """
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
    """Mean tokens that a request gets in a step."""
    return float(pace.gained.mean()) if len(pace.gained) else 1.0


@compiled
def _answer_tokens(state: Clocks, left: int) -> float:
    """Guess of the mean length, in tokens, of the answers under way and the next one."""
    every = (state.tokens + expected_rest(state.left, state.tokens)).sum() + min(left, HORIZON_TOKENS)
    return float(max(every / (1 + len(state.tokens)), LEAST_ANSWER_TOKENS))
