"""SLO classes in the two plans: who is behind, what is verified for them, how much prompt a step may hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import Batch, DraftPlan, ExecutionMode, Waiting
from outrider_runtime.control.choice import Lengths, TargetPrice, best_lengths
from outrider_runtime.control.costs import Shape
from outrider_runtime.control.drafting import DraftProblem, Pressure
from outrider_runtime.control.latency import OnlineLatency
from outrider_runtime.control.problem import Columns, Step, verification_gains
from outrider_runtime.control.slo import (
    HORIZON_TOKENS,
    MARGIN,
    MOST_LOSS,
    Clocks,
    Fuller,
    behind,
    clocks,
    expected_rest,
    forced_lengths,
    has_room,
    is_crowd,
    longest_step_s,
    prompt_tokens,
)

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
ADMISSIONS = (64, 16, 4, 1)
"""Numbers of requests whose start in one step is weighed; as many as the first are no burst to care about."""
UNFORESEEN = 4.0
"""Times the target's modelled seconds: more than drafts, prompts and deviations make of them."""
LEAST_ANSWER_TOKENS = 16.0
"""Answers are taken to be no shorter: such short ones say nothing about those to come."""
TPOTs = Mapping[str | None, float]


def lengths_for_slo(
    step: Step,
    gains: Floats,
    costs: Floats,
    by_goodput: Lengths,
    latency: OnlineLatency,
    tpots_s: TPOTs,
    draft_s: float,
) -> Lengths | None:
    """The choice with the positions of those behind forced in; None where goodput's own choice serves all.

    gains: (K, N). costs: (N,), see best_lengths. by_goodput: the choice without classes. draft_s: drafts of this step.
    """
    price = _without_prompts(step, latency)
    seconds = price.decode_s(int(by_goodput.lengths.sum())) + draft_s
    if not anyone_late(step.decoding.stands(), tpots_s, seconds, 0):
        return None
    state = _clocks(step.decoding, tpots_s)
    if state is None:
        return None
    who = behind(state, seconds, gains)
    if not who.any():
        return None
    forced = forced_lengths(state, who, seconds, gains, price, step.budget)
    longest_s = longest_step_s(state, forced, gains, price, draft_s)
    paced = best_lengths(gains, costs, price, step.rate, step.budget, forced=forced, longest_s=longest_s)
    if not is_crowd(who):
        return paced
    free = best_lengths(gains, costs, price, step.rate, step.budget)
    return paced if free.value - paced.value <= MOST_LOSS * step.rate * seconds else None


def pressure(
    step: Step, problem: DraftProblem, acceptance: Acceptance, limit: int, latency: OnlineLatency, tpots_s: TPOTs,
    draft_s: float,
) -> Pressure | None:  # fmt: skip
    """Who will be behind when the next step begins; None for nobody.

    step: the next one, with what the step under way verifies in `proposed`; limit: most draft tokens.
    """
    verified = sum(step.decoding.proposed)
    step_s = _without_prompts(step, latency).decode_s(verified) + draft_s  # the next step is taken to be like this one
    if not anyone_late(step.decoding.stands(), tpots_s, 2 * step_s, 1):
        return None  # nobody, even if nothing is accepted
    state = _clocks(step.decoding, tpots_s)
    if state is None:
        return None
    state = state.later(step_s, 1.0 + verification_gains(step, acceptance, limit).sum(axis=0))
    best = np.where(problem.usable[:, None], problem.gains * problem.offers, 0.0).max(axis=0)  # (K, N)
    who = behind(state, step_s, best)
    return Pressure(state, who, step_s) if who.any() else None


def spare_s(
    step: Step, acceptance: Acceptance, limit: int, latency: OnlineLatency, tpots_s: TPOTs, draft_s: float
) -> float:  # fmt: skip
    """Seconds by which the step under way may be lengthened so that no TPOT is lost that can still be kept; infinite
    where no class decodes. Its prompts are in it: what they take is not spare.

    step: the next one, with what the step under way verifies in `proposed`; draft_s: drafts of the step.
    """
    state = _clocks(step.decoding, tpots_s)
    if state is None:
        return math.inf
    verified, price = sum(step.decoding.proposed), _without_prompts(step, latency)
    prompts_s = float(price.prompt_s(verified, np.array(float(sum(step.now.prefill_tokens)))))
    step_s = price.decode_s(verified) + prompts_s + draft_s
    gained = 1.0 + verification_gains(step, acceptance, limit).sum(axis=0)
    deadlines = state.deadlines_s(gained)
    kept = (deadlines >= step_s) | state.within_reach(step_s, gained)  # hopeless ones set no limit
    return max(0.0, float(deadlines[kept].min(initial=math.inf)) - step_s)


def nobody_can_be_late(batch: Batch, latency: OnlineLatency, tpots_s: TPOTs) -> bool:
    """Whether every class in sight bears the longest step that there can be, and a batch with all that may come: then
    neither `token_budget` nor `admissions` has anything to say. They take time, and classes are often loose."""
    named = {view.slo_class for view in batch.requests} | ({batch.next.slo_class} if batch.next else set())
    tpot_s = min((tpots_s.get(name, math.inf) for name in named), default=math.inf)
    requests = len(batch.requests) + ADMISSIONS[0]
    context = sum(view.context_tokens for view in batch.requests) + batch.token_budget
    tokens = float(batch.token_budget + requests)
    longest_s = latency.target_s(Shape(context, tokens, requests, context / 1000), ExecutionMode.RAGGED)
    prompt = batch.next.prompt_tokens if batch.next else 0
    prompt_s = latency.target_s(Shape(prompt, prompt, 1, prompt / 1000), ExecutionMode.RAGGED)
    seconds = UNFORESEEN * (longest_s + prompt_s * requests / LEAST_ANSWER_TOKENS)
    if seconds > MARGIN * tpot_s:
        return False
    return not anyone_late(batch.stands(), tpots_s, seconds, 0)


def token_budget(
    batch: Batch, step: Step, gained: Floats, verified: int, latency: OnlineLatency, tpots_s: TPOTs,
    *, draft_s: float, draft_token_s: float,
) -> int | None:  # fmt: skip
    """Most tokens that the step may batch so that its prompts break no TPOT; None for as many as fit.

    gained: (N,) tokens that each decoding request is expected to get; verified: proposals in the step.
    """
    state = _clocks(step.decoding, tpots_s)
    if state is None:
        return None
    own = len(batch.requests) + verified
    most = batch.token_budget - own
    price = _without_prompts(step, latency)
    room = prompt_tokens(state, gained, verified, price, draft_s=draft_s, draft_token_s=draft_token_s, most=most)
    return None if room >= most else own + room


def admissions(
    batch: Batch, step: Step, gained: Floats, verified: int, latency: OnlineLatency, tpots_s: TPOTs, draft_s: float
) -> int | None:  # fmt: skip
    """Most waiting requests that may start, taking them to be like the next one; None for any number.

    Where every token costs, a fuller batch is slower for all: beyond the size that its tightest class bears, all of
    them would be late instead of one waiting. An overdue request starts in any case.
    """
    following = batch.next
    if following is None:
        return None
    filling = [view for view in batch.requests if view.prefill_tokens + view.prefill_left > 0]
    idle = not step.requests and not filling  # then whoever comes first starts
    price = _without_prompts(step, latency)
    now_s, token_s = price.decode_s(verified) + draft_s, price.token_s()
    left = sum(view.prefill_tokens + view.prefill_left for view in filling)
    tpot_s = min(tpots_s.get(name, math.inf) for name in [following.slo_class, *(view.slo_class for view in filling)])
    state = _clocks(step.decoding, tpots_s)
    answer_tokens = _answer_tokens(step, following)
    one_s = float(price.prompt_s(verified, np.array(float(following.prompt_tokens))))

    def fits(more: int) -> bool:
        then_s = now_s + (len(filling) + more) * token_s
        prompt_s = float(price.prompt_s(verified, np.array(float(left + more * following.prompt_tokens))))
        turnover_s = (len(batch.requests) + more) * one_s / answer_tokens
        return has_room(state, gained, Fuller(now_s, then_s, turnover_s), prompt_s, tpot_s)

    most = next((more for more in ADMISSIONS if fits(more)), 0)
    if most == ADMISSIONS[0]:
        return None
    return max(most, int(idle or following.overdue))


def _answer_tokens(step: Step, following: Waiting) -> float:
    """Mean length of the answers under way and the next one, as far as can be guessed: so often does a request end and
    make room for another one's prompt."""
    given, left = (np.array(one, dtype=float) for one in (step.decoding.output_tokens, step.decoding.remaining_tokens))
    every = float((given + expected_rest(left, given)).sum()) + min(following.remaining_tokens, HORIZON_TOKENS)
    return max(every / (1 + step.requests), LEAST_ANSWER_TOKENS)


def drafts_s(plan: DraftPlan, neural: str | None, batch: Batch, latency: OnlineLatency) -> float:
    """Seconds that the drafts of `plan` take at the end of a step of `batch`."""
    context, requests = float(sum(view.context_tokens for view in batch.requests)), float(len(batch.requests))
    shape = Shape(context, requests, requests, context / 1000)
    names = {name for name in plan.drafters if name is not None}
    if plan.run_neural and neural is not None:
        names.add(neural)
    return math.fsum(
        latency.draft_s(name, shape, max(1, plan.neural_tokens) if name == neural else plan.draft_tokens)
        for name in names
    )


def _without_prompts(step: Step, latency: OnlineLatency) -> TargetPrice:
    """The price of a step that holds no prompt: how the requests get on where prompts are held back for them."""
    requests = step.requests
    if step.price.n_batched == requests:
        return step.price
    context = float(sum(step.decoding.context_tokens))
    return latency.price(Shape(context, requests, requests, context / 1000), uniform=True)


def anyone_late(stands: Iterable[tuple[str | None, float, int]], tpots_s: TPOTs, seconds: float, tokens: int) -> bool:
    """Whether somebody needs more than one token on top of `tokens` that come within `seconds`. In nearly every step
    the answer is no, and it has to come fast. stands: class, seconds elapsed and tokens given of each request."""
    get = tpots_s.get
    for name, elapsed_s, given in stands:
        tpot_s = get(name)
        if tpot_s is not None and given and elapsed_s + seconds > MARGIN * tpot_s * (given + tokens):
            return True
    return False


def _clocks(decoding: Columns, tpots_s: TPOTs) -> Clocks | None:
    return clocks(
        decoding.slo_class, decoding.elapsed_s, decoding.output_tokens, decoding.remaining_tokens, tpots_s
    )  # fmt: skip
