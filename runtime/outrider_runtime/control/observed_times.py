"""Seconds of steps and drafts: the profile, or a guess, corrected by every observed step.

A cost is a sum of terms (constant, context, batched tokens, ..). Its terms and rows deviate from the profile,

    seconds / profiled seconds = 1 + sum(share of a term or row * its deviation) + noise

Deviations are Gaussian. Most of a deviation is common to all terms, since a slow machine slows them all; a little is
specific to each term and row. Between observations deviations drift, and return a little towards the profile: so the
newest steps count most, and a term that steps do not show returns to the profile. The estimate is the Kalman filter of
that process.

Target and drafters are corrected separately, since a common factor would cancel in the argmax. Without a profile, the
target's first pass gives a guess, whose terms may deviate far.
Shapes: D drafters, N requests, R rows of a cost (modes of the target; a pass and the first pass of a drafter), T terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.step_times import (
    ABOVE,
    BATCHED,
    CONSTANT,
    CONTEXT,
    KNEE,
    LOGITS,
    QUERY,
    REQUEST,
    VARLEN,
    Costs,
    DrafterCost,
    LatencyModel,
    Shape,
    StepCost,
    decode_s,
    is_block,
    later_pass,
    read_tokens,
    without_prompts,
)

TERMS = 8
COMMON_VARIANCE = 3.3
"""Variance of the deviation that all terms have in common / variance of one observation: one step moves it by 77%."""
PROFILED_VARIANCE, GUESSED_VARIANCE, FIRST_VARIANCE = 0.005, 10.0, 1000.0
"""Variance of a term's own deviation: around a profile; around a drafter's guessed cost (0.1: an A100 lost 1% more at
64 requests); around the target's cost as guessed from its first pass."""
TARGET_STEPS, DRAFT_STEPS = 72, 18
"""Observations that an estimate rests on. Noise lasts for many steps at a time; the target's estimate rests on more."""
LEAST_DEVIATION = 1e-3
"""Least prediction / profile that errors are relative to."""
ABSURD_FACTOR, ABSURD_S = 8.0, 1.0
"""A pass that took more than ABSURD_FACTOR * its prediction and more than ABSURD_S is ignored: the machine slept."""
ABSURD_RUN = 8
"""Absurd times in a row after which the costs must have changed, and the times are believed."""
LONGEST_PASS_S = 120.0
"""A pass that took longer is a fault of the clock, however often it is reported."""
WINSOR_FACTOR = 2.5
"""Most that a slow pass counts, as a multiple of its prediction."""
MODEL_SHARE, LOOKUP_S = 0.15, 2e-4
"""Guesses: seconds of a model's pass / the target's, and seconds of a lookup's call."""
BLOCK_FEED_SHARE = 0.1
"""Guess: seconds of feeding a block drafter / its pass; the former is one projection, the latter several layers."""
FIRST_TOKENS_SHARE, FIRST_CONTEXT_SHARE, FIRST_KNEE = 0.1, 0.02, 256.0
"""Guesses from the target's first pass: the share of its seconds that its batched tokens take (high enough to be
careful, low enough to try speculation), the share that their context takes, and the knee in tokens."""
MODES = (ExecutionMode.UNIFORM, ExecutionMode.VARLEN, ExecutionMode.BEYOND_GRAPH)
ROWS = {mode: row for row, mode in enumerate(MODES)}
"""Row of the target's cost for each mode."""


class Belief(NamedTuple):
    """One cost and what was learned about it, in place. The drafters' arrays have one more axis (D) in front."""

    profiled: Floats
    """(R, T): coefficients of the profile, or guessed."""
    prior: Floats
    """(T+R, T+R): covariance of the deviations before any observation."""
    deviation: Floats
    """(T+R,): relative deviations of the terms and of the rows."""
    covariance: Floats
    """(T+R, T+R)"""
    costs: Floats
    """(R, T): coefficients as corrected."""


class Beliefs(NamedTuple):
    """Everything that is learned about step times, in place."""

    target: Belief
    drafts: Belief
    absurd: Ints
    """(1+D,): absurd times in a row, of the target and of each drafter."""


class TargetRun(NamedTuple):
    """A finished pass of the target."""

    row: int
    """Position in `MODES`."""
    shape: Shape
    """The pass without its proposals."""
    scored_tokens: int
    """See `Outcome`."""
    seconds: float


class Drafting(NamedTuple):
    """The work of a step's drafters and the seconds that it took: columns of its `DraftPlan`, context tokens (N,)."""

    feed: Ints
    drafter_order: Ints
    passes: Ints
    widths: Ints
    context: Ints
    seconds: Floats
    """(D,); NaN: it did not run."""


class PlainStep(NamedTuple):
    """Seconds of a step without proposals."""

    decode_s: float
    """Seconds of its decoding requests alone; 0 if there are none, NaN if a time of the step was absurd and dropped."""
    prompts_s: float
    """Seconds that its prompts add."""


def _prior(rows: int, own: float) -> Floats:
    """(T+R, T+R): covariance of the deviations before any observation."""
    prior = np.zeros((TERMS + rows, TERMS + rows))
    prior[:TERMS, :TERMS] = COMMON_VARIANCE + own * np.eye(TERMS)
    prior[TERMS:, TERMS:] = PROFILED_VARIANCE * np.eye(rows)
    return prior


def _belief(profiled: Floats, prior: Floats) -> Belief:
    return Belief(profiled, prior, np.zeros(prior.shape[:-1]), prior.copy(), profiled.copy())


@compiled
def _plausible(seconds: float, predicted_s: float, absurd: Ints) -> bool:
    """Whether to learn from a time. Absurd times are ignored until `ABSURD_RUN` of them came in a row. absurd: (1,),
    such times in a row so far."""
    if not 0.0 < seconds <= LONGEST_PASS_S:
        return False
    if seconds <= max(ABSURD_S, ABSURD_FACTOR * predicted_s) or predicted_s <= 0.0:
        absurd[0] = 0
        return True
    absurd[0] += 1
    return bool(absurd[0] > ABSURD_RUN)


@compiled
def _shares(terms: Floats) -> tuple[Floats, float]:
    """(T+R,): share of each term and row in the sum of `terms` (R, T); and the sum."""
    (rows, columns), total = terms.shape, 0.0
    shares = np.zeros(columns + rows)
    for row in range(rows):
        for term in range(columns):
            shares[term] += terms[row, term]
            shares[columns + row] += terms[row, term]
            total += terms[row, term]
    for i in range(len(shares)):
        shares[i] /= max(total, 1e-30)
    return shares, total


@compiled
def _observe(cost: Belief, terms: Floats, seconds: float, absurd: Ints, steps: int) -> float:
    """Learn from measured `seconds` of a cost whose profiled seconds are `terms` (R, T). Returns the predicted seconds;
    NaN if the time is not plausible, 0 for a cost of zero.

    With x the shares, P the covariance, m the deviations, rho the part of them that is kept, y = seconds (at most
    `most_s`) / profiled seconds and n = prediction / profile, at most 1 (errors are relative to the shorter one), this
    is Kalman's update:

        P <- rho P + (1 - rho) P0,  m <- sqrt(rho) m
        g = P x / (n^2 + x' P x),  m <- m + g (y - 1 - x' m),  P <- P - g (P x)'
    """
    shares, total = _shares(terms)
    deviation = 0.0
    for i in range(len(shares)):
        deviation += shares[i] * cost.deviation[i]
    predicted_s = total * max(0.0, 1.0 + deviation)
    if not _plausible(seconds, predicted_s, absurd):
        return np.nan
    if total <= 0.0:
        return 0.0
    # A time up to the profiled one counts in full, even if far above the prediction; so does a run of absurd times.
    most_s = np.inf if absurd[0] > ABSURD_RUN else max(WINSOR_FACTOR * predicted_s, total)
    noise = min(1.0, max(predicted_s / total, LEAST_DEVIATION)) ** 2
    _update(cost, shares, min(seconds, most_s) / total - 1.0, noise, 1.0 - 1.0 / (COMMON_VARIANCE * steps**2))
    _apply(cost)
    return float(predicted_s)


@compiled
def _update(cost: Belief, shares: Floats, observed: float, noise: float, kept: float) -> None:
    """Kalman's update of `_observe`, in loops: a vector for each term of it took most of the time.

    observed: y - 1. noise: n^2. kept: rho."""
    deviation, covariance, spread = cost.deviation, cost.covariance, np.zeros(len(shares))
    variance, error, drift = noise, observed, np.sqrt(kept)
    for i in range(len(shares)):
        for j in range(len(shares)):
            covariance[i, j] = kept * covariance[i, j] + (1.0 - kept) * cost.prior[i, j]
            spread[i] += covariance[i, j] * shares[j]
        deviation[i] *= drift
        variance += shares[i] * spread[i]
        error -= shares[i] * deviation[i]
    for i in range(len(shares)):
        gain = spread[i] / variance
        deviation[i] += gain * error
        for j in range(len(shares)):
            covariance[i, j] -= gain * spread[j]


@compiled
def _apply(cost: Belief) -> None:
    """Set the corrected coefficients. None is negative: a deviation stops at -1."""
    rows, terms = cost.costs.shape
    for term in range(terms):
        cost.deviation[term] = max(cost.deviation[term], -1.0)
        for row in range(rows):
            factor = max(0.0, 1.0 + cost.deviation[term] + cost.deviation[terms + row])
            cost.costs[row, term] = cost.profiled[row, term] * (1.0 if term == KNEE else factor)


@compiled
def _add_terms(seconds: Floats, cost: Floats, shape: Shape, passes: float) -> None:
    """Add the seconds of `passes` over a shape, by term. seconds, cost: (T,); see `step_times.pass_s`."""
    seconds[CONSTANT] += passes * cost[CONSTANT]
    seconds[CONTEXT] += passes * cost[CONTEXT] * shape.n_context
    seconds[BATCHED] += passes * cost[BATCHED] * shape.n_batched
    seconds[ABOVE] += passes * cost[ABOVE] * max(0.0, shape.n_batched - cost[KNEE])
    seconds[REQUEST] += passes * cost[REQUEST] * shape.n_requests
    seconds[QUERY] += passes * cost[QUERY] * shape.n_context_query
    seconds[LOGITS] += passes * cost[LOGITS] * (shape.n_batched - shape.n_prompt)


@compiled
def _draft_terms(cost: Floats, plan: Drafting, d: int, costs: Costs) -> Floats:
    """(2, T): seconds of a drafter's passes by term. cost: (2, T), of a pass, and of what the first pass adds to it.

    A block drafter is fed (second row), and makes one pass if it proposes. Any other drafter makes its first pass
    anyway.
    """
    terms, first = np.zeros(cost.shape), _first_pass(plan, costs.budgets[d], d)
    _add_terms(terms[1], cost[1], first, 1.0)
    if is_block(costs, d):
        if plan.passes[d] > 0:
            _add_terms(terms[0], cost[0], later_pass(first.n_context, first.n_requests, 1.0), 1.0)
        return terms
    _add_terms(terms[0], cost[0], first, 1.0)
    if costs.passes[d] and plan.passes[d] > 1:
        later = later_pass(first.n_context, first.n_requests, float(plan.widths[d]))
        _add_terms(terms[0], cost[0], later, plan.passes[d] - 1.0)
    return terms


@compiled
def _first_pass(plan: Drafting, budget: float, drafter: int) -> Shape:
    """Shape of a first pass: over the requests whose tokens the drafter is fed; for a lookup, over those that use it.

    budget: most context tokens of a request that it reads; 0: all.
    """
    fed, requests, cached = plan.feed[drafter].sum(), 0, 0.0
    for i in range(len(plan.context)):
        takes_part = plan.feed[drafter, i] > 0
        for rank in range(plan.drafter_order.shape[0] if fed == 0 else 0):
            takes_part |= plan.drafter_order[rank, i] == drafter
        requests += takes_part
        cached += read_tokens(plan.context[i], budget) if takes_part else 0.0
    return Shape(cached, float(max(1, requests, fed)), float(max(1, requests)), cached / 1000, 0.0)


@compiled
def observe_target(cost: Belief, run: TargetRun, absurd: Ints) -> float:
    """Learn from a pass of the target, see `_observe`."""
    terms: Floats = np.zeros(cost.profiled.shape)
    _add_terms(terms[run.row], cost.profiled[run.row], verifying(run.shape, run.scored_tokens), 1.0)
    return _observe(cost, terms, run.seconds, absurd, TARGET_STEPS)


@compiled
def observe_times(costs: Costs, beliefs: Beliefs, run: TargetRun, plan: Drafting) -> PlainStep:
    """Learn from a finished step: the target's pass, and the drafts at its end."""
    drafts, plausible = beliefs.drafts, not np.isnan(observe_target(beliefs.target, run, beliefs.absurd[:1]))
    for d in range(len(plan.seconds)):
        if plan.seconds[d] > 0.0:
            draft = Belief(
                drafts.profiled[d], drafts.prior[d], drafts.deviation[d], drafts.covariance[d], drafts.costs[d]
            )
            terms = _draft_terms(draft.profiled, plan, d, costs)
            predicted_s = _observe(draft, terms, plan.seconds[d], beliefs.absurd[d + 1 : d + 2], DRAFT_STEPS)
            plausible &= not np.isnan(predicted_s)
    return _plain_step(costs, run.shape) if plausible else PlainStep(np.nan, 0.0)


@compiled
def verifying(shape: Shape, scored_tokens: int) -> Shape:
    """A shape with `scored_tokens` added, assuming that their contexts are the mean one."""
    query = shape.n_context_query + scored_tokens * shape.n_context / max(1.0, shape.n_requests) / 1000
    return Shape(shape.n_context, shape.n_batched + scored_tokens, shape.n_requests, query, shape.n_prompt)


@compiled
def _plain_step(costs: Costs, shape: Shape) -> PlainStep:
    alone = without_prompts(shape)
    if alone.n_requests == 0.0:
        return PlainStep(0.0, 0.0)
    plain_s = decode_s(costs, alone, 0.0)
    return PlainStep(plain_s, decode_s(costs, shape, 0.0) - plain_s if shape.n_prompt > 0.0 else 0.0)


class StepTimes:
    """Step times as the controller believes them at the moment."""

    def __init__(self, model: LatencyModel | None, settings: Settings) -> None:
        model = _finite(model or LatencyModel({}))
        self.learning = not model.target
        """There is no profile of the target."""
        self._drafters, self._profiled = settings.drafters, model.drafters
        self._graph = math.inf if settings.largest_graph_tokens is None else float(settings.largest_graph_tokens)
        self._traits = (
            np.array([_passes(drafter, model.drafters) for drafter in settings.drafters], dtype=bool),
            np.array([drafter.reads for drafter in settings.drafters], dtype=bool),
            np.array([drafter.needs_hidden for drafter in settings.drafters], dtype=bool),
            np.array([float(drafter.kv_budget or 0) for drafter in settings.drafters]),
        )
        self._absurd = np.zeros(1 + len(settings.drafters), np.int64)
        self._guessed_from_s = math.inf
        """Seconds of the pass that the target's cost was guessed from."""
        target = _belief(_rows(model.target), _prior(len(MODES), PROFILED_VARIANCE))
        drafts = self._draft_beliefs()
        self.beliefs = Beliefs(target, drafts, self._absurd)
        self._guess_drafts()
        self.costs = Costs(target.costs, self._graph, drafts.costs, *self._traits)
        """The corrected costs, in arrays that are updated in place."""
        self.columns = tuple(self.costs)
        """Fields of `costs`, in a plain tuple: compiled calls unpack it faster than a named one."""
        self.memory = tuple(target), tuple(drafts), self._absurd
        """`beliefs` in plain tuples."""

    def _draft_beliefs(self) -> Belief:
        priors = np.zeros((len(self._drafters), *2 * (TERMS + 2,)))
        for d, drafter in enumerate(self._drafters):
            priors[d] = _prior(2, PROFILED_VARIANCE if drafter.name in self._profiled else GUESSED_VARIANCE)
        return _belief(np.zeros((len(self._drafters), 2, TERMS)), priors)

    def _guess_drafts(self) -> None:
        """Set the costs of drafters that have not run: as profiled, else guessed from the target's."""
        target, drafts = self.beliefs.target.costs[VARLEN], self.beliefs.drafts
        guess: Floats = MODEL_SHARE * target
        guess[KNEE] = target[KNEE]
        for d, drafter in enumerate(self._drafters):
            if not drafts.deviation[d].any():
                cost = _draft_rows(drafter, self._profiled, target if drafter.is_target else guess)
                drafts.profiled[d] = drafts.costs[d] = cost

    def learn(self, run: TargetRun) -> None:
        """Guess the target's cost from a pass, in the absence of a profile; `observe_times` learns the rest.

        The first pass gives the first guess, and one of half its time gives another: a guess from a warm-up or a long
        prompt would spoil what follows, since errors are relative to it.
        """
        shape = verifying(run.shape, run.scored_tokens)
        if 0.0 < run.seconds <= LONGEST_PASS_S and run.seconds < self._guessed_from_s / 2 and shape.n_batched > 0.0:
            self._guessed_from_s = run.seconds
            self._guess_target(_first_cost(shape, run.seconds))
        self._guess_drafts()

    def _guess_target(self, cost: StepCost) -> None:
        target = self.beliefs.target
        target.profiled[:] = target.costs[:] = _rows({ExecutionMode.VARLEN: cost})
        target.prior[:] = target.covariance[:] = _prior(len(MODES), FIRST_VARIANCE)
        target.deviation[:] = 0.0


def _finite(model: LatencyModel) -> LatencyModel:
    """Leave out costs with a coefficient that is infinite or not a number: it would spoil every decision."""

    def is_cost(*costs: StepCost) -> bool:
        return all(bool(np.isfinite(cost.coefficients()).all()) for cost in costs)

    return LatencyModel(
        {mode: cost for mode, cost in model.target.items() if is_cost(cost)},
        {name: costs for name, costs in model.drafters.items() if is_cost(costs.cost, costs.first_pass)},
    )


def _first_cost(shape: Shape, seconds: float) -> StepCost:
    """A target's cost as guessed from one pass: mostly a constant, a little for each token."""
    above = max(0.0, shape.n_batched - FIRST_KNEE)
    token_s = FIRST_TOKENS_SHARE * seconds / (shape.n_batched + above)
    context_s = FIRST_CONTEXT_SHARE * seconds / shape.n_context if shape.n_context > 0.0 else 0.0
    return StepCost(
        per_context_token_s=context_s, per_batched_token_s=token_s, per_batched_token_above_knee_s=token_s,
        knee_tokens=FIRST_KNEE, constant_s=seconds - token_s * (shape.n_batched + above) - context_s * shape.n_context,
    )  # fmt: skip


def _rows(target: Mapping[ExecutionMode, StepCost]) -> Floats:
    """(3, T): the target's cost by mode. A mode that was not measured uses the one that behaves most like it."""
    order = (ExecutionMode.VARLEN, *MODES)
    known = [next((target[other] for other in (mode, *order) if other in target), StepCost()) for mode in MODES]
    return np.array([cost.coefficients() for cost in known])


def _draft_rows(drafter: Drafter, profiled: Mapping[str, DrafterCost], guess: Floats) -> tuple[Floats, Floats]:
    """(T,) of a pass, and (T,) of what the first pass adds to it: as profiled, else guessed. guess: (T,) of a model's
    pass."""
    nothing = np.zeros(len(guess))
    if drafter.name in profiled:
        cost = profiled[drafter.name]
        return cost.cost.coefficients(), cost.first_pass.coefficients()
    if drafter.is_block:
        return guess, BLOCK_FEED_SHARE * guess
    return (guess if drafter.passes else StepCost(constant_s=LOOKUP_S).coefficients()), nothing


def _passes(drafter: Drafter, profiled: Mapping[str, DrafterCost]) -> bool:
    cost = profiled.get(drafter.name)
    return drafter.passes if cost is None else cost.autoregressive
