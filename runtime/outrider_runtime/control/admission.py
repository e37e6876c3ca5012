"""Holding back prompts and new requests while a class with a tight TPOT decodes: a policy of its own, switchable.

A TPOT is a mean over the whole answer: what one step loses, those after it may make up. And a prompt that is read at
once delays everybody least, as each further step with a part of it costs more than one without. So a step takes as much
of the prompts as puts no TPOT out of reach, and always what lengthens it by a fifth. N decoding requests.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Batch, Floats
from outrider_runtime.control.cost import Shape
from outrider_runtime.control.latency import Latency
from outrider_runtime.control.slo import HORIZON_TOKENS, MARGIN, Clocks, expected_rest

MOST_PATIENCE_USED = 1.0
"""Prompts are not held back once one has waited for this share of what its own class bears: where load stays high,
prompts that give way would queue up without end."""
LEAST_PROMPT_SHARE = 0.2
"""By this share of its time prompts may lengthen every step, however tight: one that is never read never starts."""
LARGE_CHUNK_TOKENS = 512
"""Where a token costs nothing that was measured."""
CHUNKS = np.arange(17) / 16
"""Parts of the room between the least chunk and the most that are looked at."""
ONE = np.ones(1)
ADMISSIONS = (64, 16, 4, 1)
"""Numbers of requests whose start in one step is weighed; as many as the first are no burst to care about."""
LEAST_ANSWER_TOKENS = 16.0
"""Answers are taken to be no shorter: such short ones say nothing about those to come."""


class Pace(NamedTuple):
    """How the requests that decode get on in a step without prompts."""

    clocks: Clocks
    base: Shape
    """Of the step, with neither proposals nor prompts."""
    proposals: int
    gained: Floats
    """(N,): tokens that each is expected to get."""
    drafts_s: float


def token_budget(batch: Batch, pace: Pace, latency: Latency, draft_token_s: float) -> int | None:
    """Most tokens that the step may batch so that its prompts break no TPOT; None for as many as fit.

    Only who would not end in time any more limits the chunk, and not who could not even bear the smallest one.
    draft_token_s: seconds of a prompt token in the first pass of the drafters that read it.
    """
    own = round(pace.base.n_requests) + pace.proposals
    most = batch.token_budget - own
    step_s = latency.decode_s(pace.base, pace.proposals)
    token_s = float(latency.prompts_s(pace.base, pace.proposals, ONE)[0])
    least = max(1, int(LEAST_PROMPT_SHARE * step_s / token_s)) if token_s > 0 else LARGE_CHUNK_TOKENS
    if batch.patience_used >= MOST_PATIENCE_USED or most <= least or not np.isfinite(pace.clocks.tpot_s).any():
        return None
    chunks = np.floor(least + CHUNKS * (most - least))
    longer_s = latency.prompts_s(pace.base, pace.proposals, chunks) + draft_token_s * chunks
    slack_s = pace.clocks.slack_s((step_s + pace.drafts_s) / pace.gained)
    spare_s = float(slack_s[slack_s >= longer_s[0]].min(initial=math.inf))
    room = int(chunks[longer_s <= spare_s].max(initial=least))
    return None if room >= most else own + room


def admissions(batch: Batch, pace: Pace, latency: Latency, tpots_s: Floats) -> int | None:
    """Most waiting requests that may start, taking them to be like the next one; None for any number.

    Where every token costs, a fuller batch is slower for all: beyond the size that its tightest class bears, all of
    them would be late instead of one waiting. An overdue request starts in any case, and so does one on an idle engine.
    """
    following = batch.next
    if following is None:
        return None
    reading = batch.prompt + batch.prompt_left > 0
    tpot_s = min(float(tpots_s[following.slo_class]), float(tpots_s[batch.slo_class[reading]].min(initial=math.inf)))
    most = next((more for more in ADMISSIONS if _fits(more, batch, pace, latency, tpot_s)), 0)
    if most == ADMISSIONS[0]:
        return None
    return max(most, int(len(batch) == 0 or following.overdue))


def _fits(more: int, batch: Batch, pace: Pace, latency: Latency, tpot_s: float) -> bool:
    """Nobody whose TPOT can be kept now loses it, and those who start can keep their own. The fuller batch's prompts to
    come count for both: in the life of one request each of the others ends and makes room for a prompt to be read."""
    following = batch.next
    assert following is not None
    reading = batch.prompt + batch.prompt_left
    now_s = latency.decode_s(pace.base, pace.proposals) + pace.drafts_s
    token_s = latency.decode_s(pace.base, pace.proposals + 2) - latency.decode_s(pace.base, pace.proposals + 1)
    then_s = now_s + (int((reading > 0).sum()) + more) * token_s
    unread = int(reading.sum()) + more * following.prompt_tokens
    prompt_s, one_s = latency.prompts_s(pace.base, pace.proposals, np.array([unread, following.prompt_tokens], float))
    turnover_s = (len(batch) + more) * one_s / _answer_tokens(pace.clocks, following.left)
    mean_pace = float(pace.gained.mean()) if len(pace.gained) else 1.0
    if then_s / mean_pace + turnover_s > MARGIN * tpot_s:
        return False
    safe = pace.clocks.savable(now_s / pace.gained)
    delayed = pace.clocks._replace(elapsed_s=pace.clocks.elapsed_s + prompt_s)
    return not (safe & ~delayed.savable(then_s / pace.gained + turnover_s)).any()


def _answer_tokens(clocks: Clocks, left: int) -> float:
    """Mean length of the answers under way and the next one, as far as can be guessed."""
    every = float((clocks.tokens + expected_rest(clocks.left, clocks.tokens)).sum()) + min(left, HORIZON_TOKENS)
    return max(every / (1 + len(clocks.tokens)), LEAST_ANSWER_TOKENS)
