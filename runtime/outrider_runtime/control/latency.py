"""Step times as the controller believes them now: the profile (or what was learned), corrected online.

Target and drafters are corrected apart, as one common factor would cancel in the argmax. What the correction of the
target leaves is learned for each kind of step: there lies the model's error at the crossover, and the time that no
device reports (the scheduler's, which is longer in a step that verifies).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.batch import Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import (
    ABOVE,
    BATCHED,
    CONSTANT,
    KNEE,
    LOGITS,
    QUERY,
    DrafterCost,
    LatencyModel,
    Shape,
    StepCost,
    pass_s,
    token_s,
    without_prompts,
)
from outrider_runtime.control.fit import LearnedCost
from outrider_runtime.control.plans import DraftPlan, ExecutionMode
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.value import Price

ABSURD_FACTOR, ABSURD_S = 8.0, 1.0
"""A step that took longer than both says that the machine slept, not what a step costs."""
ABSURD_RUN = 8
"""So many in a row are no accident: the costs have changed."""
WINSOR_FACTOR = 2.5
"""One slow step counts as at most so many times its prediction."""
MODEL_SHARE, LOOKUP_S = 0.15, 2e-4
"""Before its first measurement: a model's pass as a share of the target's, and a lookup's call."""
TARGET_MEMORY = (0.5 ** (1 / 50), 0.3, 8.0)
"""See `_correct`. Noise comes in spells of many steps, so a window of 70 holds only a few spells: unlikeness needs good
reasons."""
DRAFT_MEMORY = (0.5 ** (1 / 12), 0.3, 1.0)
PLAIN, EVEN, UNEVEN = range(3)
"""Kinds of step: nothing is verified, equally many for every request, or not."""
SIZES = 14
"""Powers of two of the batch size that are told apart."""
PRIOR_STEPS = 8.0
"""What the mean of other steps counts for."""
UNIFORM, RAGGED, BEYOND = range(3)
MODES = (ExecutionMode.UNIFORM, ExecutionMode.RAGGED, ExecutionMode.BEYOND_GRAPH)
ROWS = {mode: row for row, mode in enumerate(MODES)}
"""Of the target's coefficients."""


DEVIATION_KEEP = 0.5 ** (1 / 300)
"""Of what was known of deviations, at each step."""
MOST_DEVIATION = 0.5
"""Of the predicted time, that one step may deviate by: the rest is an accident."""


class Costs(NamedTuple):
    """Step times as compiled code predicts them. D drafters."""

    target: Floats
    """(3, 8): of each mode, corrected."""
    graph: float
    """Batched tokens of the largest graph."""
    deviations: Floats
    """[kind, size, (weight, deviation)]: what the model gets wrong about steps of a kind at a size of batch."""
    drafts: Floats
    """(D, 2, 8): of a pass, and of what the first one costs beyond it, corrected."""
    passes: Bools
    """(D,): every token is a pass."""
    reads: Bools
    """(D,): it must be fed committed tokens."""
    hidden: Bools
    """(D,): it reads the target's hidden states."""
    budgets: Floats
    """(D,): tokens of a request that a pass reads at most; 0: all."""


@compiled
def _size(requests: float) -> int:
    """Number of a batch size among SIZES."""
    size, rest = 0, int(requests)
    while rest:
        rest >>= 1
        size += 1
    return min(size, SIZES - 1)


@compiled
def _deviation(sums: Floats, kind: int, size: int) -> float:
    """To be added to the model's prediction of a kind of step: its mean, shrunk to the kind's at other sizes, that to
    the mean of all kinds, and that to none. So what all kinds share does not count for those alone that were seen, or
    the others would look cheap."""
    weight = total = kind_weight = kind_total = 0.0
    for k in range(sums.shape[0]):
        for s in range(sums.shape[1]):
            weight += sums[k, s, 0]
            total += sums[k, s, 1]
            if k == kind:
                kind_weight += sums[k, s, 0]
                kind_total += sums[k, s, 1]
    own_weight, own = sums[kind, size, 0], sums[kind, size, 1]
    mean = (total - kind_total) / (weight - kind_weight + PRIOR_STEPS)
    mean = (kind_total - own + PRIOR_STEPS * mean) / (kind_weight - own_weight + PRIOR_STEPS)
    return float((own + PRIOR_STEPS * mean) / (own_weight + PRIOR_STEPS))


@compiled
def _deviations(sums: Floats, requests: float) -> tuple[float, float, float]:
    """Of each kind of step at a batch size. One that verifies does all that a plain one does: where it seems to take
    less, the plain ones came in a slow spell of the machine."""
    size = _size(requests)
    plain = _deviation(sums, PLAIN, size)
    return plain, max(plain, _deviation(sums, EVEN, size)), max(plain, _deviation(sums, UNEVEN, size))


@compiled
def _add_deviation(sums: Floats, kind: int, requests: float, seconds: float, predicted_s: float) -> None:
    """A decoding step's time without its drafts, and what the model says of it."""
    most, size = MOST_DEVIATION * predicted_s, _size(requests)
    sums *= DEVIATION_KEEP
    sums[kind, size, 0] += 1.0
    sums[kind, size, 1] += min(max(seconds - predicted_s, -most), most)


@compiled
def _rescale(base: Floats, values: Floats, costs: Floats) -> None:
    """costs: (R, 8), set to `base` (R, 8) with its constants times values[0] and all other terms times values[1]."""
    for row in range(base.shape[0]):
        for term in range(base.shape[1]):
            costs[row, term] = base[row, term] * (1.0 if term == KNEE else values[0] if term == CONSTANT else values[1])


@compiled
def _correct(
    sums: Floats, memory: tuple[float, float, float], first: float, second: float, seconds: float, base: Floats,
    values: Floats, costs: Floats,
) -> None:  # fmt: skip
    """Recursive least squares with forgetting on a cost of two parts: `y ~ m_1 * part_1 + m_2 * part_2`.

    Parts are seconds as a model predicts them, their sum positive, so both multipliers are 1 where the model is right.
    Errors are relative to the prediction. The prior is `strength * ((m_1 + m_2) / 2 - 1)^2 + likeness * (m_1 - m_2)^2`:
    a machine that slows down slows both parts, and only data that tell them apart part them. Directions that the last
    data do not show return there instead of drifting.

    sums: (5,), of the normal equations. memory: (share kept at an observation, strength, likeness). values: (2,), set
    to the non-negative solution; costs: (R, 8), to `base` (R, 8) corrected.
    """
    keep, strength, likeness = memory
    total = first + second
    x, y, target = first / total, second / total, seconds / total
    sums *= keep
    sums += np.array([x * x, x * y, y * y, x * target, y * target])
    mean = strength / 4
    a11, a12, a22 = sums[0] + mean + likeness, sums[1] + mean - likeness, sums[2] + mean + likeness
    b1, b2 = sums[3] + 2 * mean, sums[4] + 2 * mean
    determinant = a11 * a22 - a12 * a12  # positive: the prior makes it so
    m1, m2 = (a22 * b1 - a12 * b2) / determinant, (a11 * b2 - a12 * b1) / determinant
    if m1 < 0.0:
        m1, m2 = 0.0, max(0.0, b2 / a22)
    elif m2 < 0.0:
        m1, m2 = max(0.0, b1 / a11), 0.0
    values[0], values[1] = m1, m2
    _rescale(base, values, costs)


@compiled
def _step_s(
    costs: Costs, more_s: tuple[float, float, float], shape: Shape, proposals: float
) -> float:  # fmt: skip
    """Seconds of the target's pass of `shape` and its proposals, of unequal lengths. Past the largest graph other
    coefficients hold, and no deviation is known."""
    if shape.n_batched + proposals > costs.graph:
        return pass_s(costs.target[BEYOND], shape, proposals)
    plain = proposals == 0.0
    row = UNIFORM if plain and shape.n_prompt == 0.0 else RAGGED
    return pass_s(costs.target[row], shape, proposals) + more_s[PLAIN if plain else UNEVEN]


@compiled
def decode_s(costs: Costs, shape: Shape, proposals: float) -> float:
    """Seconds of the target's pass of `shape` and so many proposals of unequal lengths."""
    return _step_s(costs, _deviations(costs.deviations, shape.n_requests), shape, proposals)


@compiled
def plain_rate(costs: Costs, shape: Shape) -> float:
    """Tokens a second of requests that decode by themselves, nothing proposed; 0 while no cost is known."""
    alone = without_prompts(shape)
    seconds = decode_s(costs, alone, 0.0)
    return alone.n_requests / seconds if seconds > 0.0 else 0.0


@compiled
def prompt_s(costs: Costs, shape: Shape, proposals: float, tokens: float) -> float:
    """By how much so many `tokens` of prompts lengthen a step of `shape` that verifies `proposals`."""
    longer = Shape(
        shape.n_context, shape.n_batched + tokens, shape.n_requests, shape.n_context_query, shape.n_prompt + tokens
    )
    seconds = decode_s(costs, longer, proposals) - decode_s(costs, shape, proposals)
    return float(max(seconds, costs.target[RAGGED, BATCHED] * tokens))


@compiled
def _fill(seconds: Floats, cost: Floats, shape: Shape, first: int, more_s: float) -> None:
    """Seconds of `shape` with `first`, `first` + 1, .. proposals."""
    fixed_s = pass_s(cost, shape, 0.0) - cost[ABOVE] * max(0.0, shape.n_batched - cost[KNEE]) + more_s
    for n in range(len(seconds)):
        above = max(0.0, shape.n_batched + first + n - cost[KNEE])
        seconds[n] = fixed_s + (cost[BATCHED] + cost[LOGITS]) * (first + n) + cost[ABOVE] * above


@compiled
def price(costs: Costs, shape: Shape, context: Ints, read_s: float, goodput: float, most: int) -> Price:
    """What a step takes around `shape`, which holds no proposals yet, with up to `most` of them. A step with prompts
    has no uniform form.

    context: (N,), cached tokens of each request. read_s: what a verified token costs in the drafters' next first
    passes. goodput: measured, by the modelled one of plain decoding.
    """
    more_s, most = _deviations(costs.deviations, shape.n_requests), max(0, most)
    uneven, even = np.empty(most + 1), np.full(most + 1, np.inf)
    in_graph = int(max(0.0, min(most + 1.0, costs.graph - shape.n_batched + 1.0)))
    _fill(uneven[1:in_graph], costs.target[RAGGED], shape, 1, more_s[UNEVEN])
    _fill(uneven[in_graph:], costs.target[BEYOND], shape, in_graph, 0.0)
    if shape.n_prompt == 0.0:
        _fill(even[1:in_graph], costs.target[UNIFORM], shape, 1, more_s[EVEN])
        _fill(even[in_graph:], costs.target[BEYOND], shape, in_graph, 0.0)
    even[0] = uneven[0] = _step_s(costs, more_s, shape, 0.0)
    node_s = np.empty(len(context))
    for i in range(len(context)):
        node_s[i] = costs.target[RAGGED, QUERY] * context[i] / 1000 + read_s
    rate = plain_rate(costs, shape) * goodput
    first_s = token_s(costs.target[BEYOND if shape.n_batched > costs.graph else RAGGED], shape.n_batched)
    return Price(uneven, even, node_s, rate, first_s)


@compiled
def draft_columns(costs: Costs, context: Ints, prompts: float) -> tuple[Floats, Floats, Floats]:
    """Three (D,) of seconds: the first pass over a token a request, or a call, and over `prompts` tokens; each pass
    more; a token in a first pass, of those that read. Of the target itself, what a pass takes without requests.

    context: (N,), cached tokens of the requests that decode.
    """
    drafters, decoding = len(costs.drafts), float(len(context))
    first_s, more_s, each_s = np.zeros(drafters), np.zeros(drafters), np.zeros(drafters)
    for d in range(drafters):
        cost, read = costs.drafts[d], _read(context, costs.budgets[d])
        shape = Shape(read, decoding, decoding, read / 1000, 0.0)
        if costs.budgets[d] > 0.0 and not costs.reads[d]:  # its requests have a price each
            shape = Shape(0.0, 0.0, 0.0, 0.0, 0.0)
        once = pass_s(cost[0], shape, 0.0)
        each_s[d] = (token_s(cost[0], decoding) + token_s(cost[1], decoding)) * costs.reads[d]
        first_s[d] = once + pass_s(cost[1], shape, 0.0) + _fed_s(cost, decoding, prompts * costs.hidden[d])
        more_s[d] = once * costs.passes[d]
    return first_s, more_s, each_s


@compiled
def _fed_s(costs: Floats, decoding: float, tokens: float) -> float:
    """Seconds by which a first pass over `decoding` tokens grows with so many more: mostly above the knee, which a
    token alone is not. costs: (2, 8) of a drafter."""
    seconds = 0.0
    for cost in costs:
        bent = max(0.0, decoding + tokens - cost[KNEE]) - max(0.0, decoding - cost[KNEE])
        seconds += cost[BATCHED] * tokens + cost[ABOVE] * bent
    return seconds


@compiled
def feeding_s(costs: Costs, missing: Ints, decoding: float) -> Floats:
    """(D, N): seconds by which a first pass over `decoding` tokens grows with all that is `missing` (D, N) of one
    request; 0 of drafters that read nothing."""
    seconds = np.zeros(missing.shape)
    for d in np.flatnonzero(costs.reads):
        for i in range(missing.shape[1]):
            seconds[d, i] = _fed_s(costs.drafts[d], decoding, float(missing[d, i]))
    return seconds


@compiled
def _read(context: Ints, budget: float) -> float:
    """Cached tokens that a pass over requests of so many (N,) reads. budget: of each at most; 0: all."""
    read = 0.0
    for i in range(len(context)):
        read += min(float(context[i]), budget) if budget > 0.0 else float(context[i])
    return read


@compiled
def _later(context: float, requests: float, width: float) -> Shape:
    """A draft's later pass over `width` nodes of each request."""
    return Shape(context, width * requests, requests, width * context / 1000, 0.0)


@compiled
def wide_pass_s(costs: Costs, widest: int, context: float, decoding: float) -> Floats:
    """(D, W): seconds of each pass after the first, by the width of the trees, 1..W; 0 of one without passes."""
    seconds = np.zeros((len(costs.drafts), widest))
    for d in range(len(costs.drafts)):
        for w in range(widest if costs.passes[d] else 0):
            seconds[d, w] = pass_s(costs.drafts[d, 0], _later(context, decoding, w + 1.0), 0.0)
    return seconds


@compiled
def _above_s(cost: Floats, requests: int) -> float:
    """A request's part of what tokens above the knee cost, where all ask: who asks is not known yet. cost: (8,)"""
    return float(cost[ABOVE] * max(0.0, requests - cost[KNEE]) / max(1, requests))


@compiled
def asking_s(costs: Costs, context: Ints) -> Floats:
    """(D, N): seconds by which a request of so many cached tokens (N,) lengthens each pass that it asks for; 0 of
    drafters that run over the whole batch anyway. (0, 0) where all do."""
    apart = (costs.budgets > 0.0) & ~costs.reads
    if not apart.any():
        return np.zeros((0, 0))
    seconds = np.zeros((len(costs.drafts), len(context)))
    for d in np.flatnonzero(apart):
        cost = costs.drafts[d, 0]
        for i in range(len(context)):
            read = min(float(context[i]), costs.budgets[d])
            alone = pass_s(cost, Shape(read, 1.0, 1.0, read / 1000, 0.0), 0.0)
            seconds[d, i] = alone - cost[CONSTANT] + _above_s(cost, len(context))
    return seconds


@compiled
def read_s(costs: Costs, lengths: Ints, decoding: float) -> float:
    """What a verified token costs in the next first passes of those drafters that propose, `lengths` (D,)."""
    seconds = 0.0
    for d in range(len(costs.drafts)):
        if costs.reads[d] and lengths[d] > 0:
            seconds += token_s(costs.drafts[d, 0], decoding) + token_s(costs.drafts[d, 1], decoding)
    return seconds


@compiled
def _parts_s(costs: Floats, row: int, shape: Shape) -> tuple[float, float]:
    """Seconds of a pass: of the constant, and of everything else. costs: (R, 8)"""
    constant = costs[row, CONSTANT]
    return constant, pass_s(costs[row], shape, 0.0) - constant


@compiled
def _predicted_s(base: Floats, values: Floats, row: int, shape: Shape) -> float:
    """Seconds of a target's pass, corrected."""
    constant, rest = _parts_s(base, row, shape)
    return float(values[0] * constant + values[1] * rest)


@compiled
def _plausible(seconds: float, predicted_s: float, absurd: Ints) -> bool:
    """absurd: (1,), absurd times in a row."""
    if not np.isfinite(seconds) or seconds <= 0.0:
        return False
    if seconds <= max(ABSURD_S, ABSURD_FACTOR * predicted_s) or predicted_s <= 0.0:
        absurd[0] = 0
        return True
    absurd[0] += 1
    return bool(absurd[0] > ABSURD_RUN)


@compiled
def _observe_target(
    base: Floats, sums: Floats, values: Floats, costs: Costs, row: int, shape: Shape, target_s: float, winsor_s: float
) -> None:  # fmt: skip
    """winsor_s: as which a longer time counts, if the profile says no longer one."""
    constant, rest = _parts_s(base, row, shape)
    if constant + rest > 0.0:
        _correct(
            sums, TARGET_MEMORY, constant, rest, min(target_s, max(winsor_s, constant + rest)), base, values,
            costs.target,
        )  # fmt: skip


@compiled
def _draft_parts_s(costs: Floats, first: Shape, further: int, width: int) -> tuple[float, float]:
    """Seconds of a drafter's calls and of its tokens: a `first` pass and so many further ones. costs: (2, 8)"""
    later = _later(first.n_context, first.n_requests, float(width))
    calls = (1 + further) * costs[0, CONSTANT] + costs[1, CONSTANT]
    total = pass_s(costs[0], first, 0.0) + pass_s(costs[1], first, 0.0) + further * pass_s(costs[0], later, 0.0)
    return calls, total - calls


@compiled
def _first_pass(feed: Ints, asked: Ints, context: Ints, budget: float, drafter: int) -> Shape:
    """Of a drafter, over those that it is fed of; of a lookup, over those that ask it. feed: (D, N). budget: tokens of
    each that it reads at most; 0: all."""
    fed, requests, cached = feed[drafter].sum(), 0, 0.0
    for i in range(len(context)):
        takes_part = feed[drafter, i] > 0
        for rank in range(asked.shape[0] if fed == 0 else 0):
            takes_part |= asked[rank, i] == drafter
        requests += takes_part
        read = min(float(context[i]), budget) if budget > 0.0 else float(context[i])
        cached += read if takes_part else 0.0
    return Shape(cached, float(max(1, requests, fed)), float(max(1, requests)), cached / 1000, 0.0)


@compiled
def _observe_drafts(
    base: Floats, sums: Floats, values: Floats, costs: Costs, feed: Ints, asked: Ints, passes: Ints, widths: Ints,
    context: Ints, seconds: Floats,
) -> bool:  # fmt: skip
    """See `Latency.observe_drafts`. base: (D, 2, 8); sums: (D, 5); values: (D, 2)."""
    plausible = True
    for d in range(len(seconds)):
        if not seconds[d] > 0.0:
            continue
        further = max(1, passes[d]) - 1 if costs.passes[d] else 0
        first = _first_pass(feed, asked, context, costs.budgets[d], d)
        calls, tokens = _draft_parts_s(base[d], first, further, widths[d])
        predicted = values[d, 0] * calls + values[d, 1] * tokens
        if seconds[d] > max(ABSURD_S, ABSURD_FACTOR * predicted):
            plausible = False
        elif calls + tokens > 0.0:
            took_s = min(seconds[d], WINSOR_FACTOR * predicted)
            _correct(sums[d], DRAFT_MEMORY, calls, tokens, took_s, base[d], values[d], costs.drafts[d])
    return plausible


@compiled
def _observe(
    costs: tuple[Any, ...], target: tuple[Any, ...], drafts: tuple[Any, ...], absurd: Ints, row: int,
    fields: tuple[float, ...], seconds: tuple[float, float], verified: int, plan: tuple[Ints, ...], draft_s: Floats,
) -> tuple[float, float]:  # fmt: skip
    """See `Latency.observe`. target, drafts: base, sums and values of the corrections."""
    known, shape, (target_s, outside_s) = Costs(*costs), _verifying(Shape(*fields), verified), seconds
    base, sums, values = target
    predicted_s = _predicted_s(base, values, row, shape)
    plausible = _plausible(target_s, predicted_s, absurd)
    if plausible:
        _observe_target(base, sums, values, known, row, shape, target_s, WINSOR_FACTOR * predicted_s)
        if row != BEYOND and shape.n_prompt == 0.0 and not np.isnan(outside_s):
            kind = PLAIN if not verified else EVEN if row == UNIFORM else UNEVEN
            predicted_s = _predicted_s(base, values, row, shape)
            _add_deviation(known.deviations, kind, shape.n_requests, outside_s, predicted_s)
    feed, asked, passes, widths, context = plan
    told = _observe_drafts(drafts[0], drafts[1], drafts[2], known, feed, asked, passes, widths, context, draft_s)
    if not plausible or not told:
        return np.nan, 0.0
    return _plain_s(known, Shape(*fields))


@compiled
def _verifying(shape: Shape, verified: int) -> Shape:
    """With so many proposals, whose contexts are taken to be like the others'."""
    query = shape.n_context_query + verified * shape.n_context / max(1.0, shape.n_requests) / 1000
    return Shape(shape.n_context, shape.n_batched + verified, shape.n_requests, query, shape.n_prompt)


@compiled
def _plain_s(costs: Costs, shape: Shape) -> tuple[float, float]:
    """What plain decoding takes for the requests that decode, and what the prompts of the step add."""
    alone = without_prompts(shape)
    if alone.n_requests == 0.0:
        return 0.0, 0.0
    plain_s = decode_s(costs, alone, 0.0)
    return plain_s, decode_s(costs, shape, 0.0) - plain_s if shape.n_prompt > 0.0 else 0.0


class Latency:
    """Learns from each step. D drafters."""

    def __init__(self, model: LatencyModel | None, settings: Settings) -> None:
        model = model or LatencyModel({})
        self.learning = not model.target
        """No profile of the target is there."""
        self._drafters, self._profiled = settings.drafters, model.drafters
        self._graph = math.inf if settings.largest_graph_tokens is None else float(settings.largest_graph_tokens)
        self._traits = (
            np.array([_passes(one, model.drafters) for one in settings.drafters], dtype=bool),
            np.array([one.reads for one in settings.drafters], dtype=bool),
            np.array([one.needs_hidden for one in settings.drafters], dtype=bool),
            np.array([float(one.kv_budget or 0) for one in settings.drafters]),
        )
        self._learned = LearnedCost()
        self._draft_memory = np.zeros((len(settings.drafters), 5)), np.ones((len(settings.drafters), 2))
        self._deviations, self._absurd = np.zeros((3, SIZES, 2)), np.zeros(1, np.int64)
        self._take(_rows(model.target))

    def _take(self, target: Floats) -> None:
        """target: (3, 8), uncorrected. What is not known of a drafter follows from it."""
        model = MODEL_SHARE * target[RAGGED]
        model[KNEE] = target[RAGGED, KNEE]
        rows = [_draft_rows(one, self._profiled, target[RAGGED] if one.is_target else model) for one in self._drafters]
        drafts = np.array(rows).reshape(-1, 2, target.shape[1])
        self._of_drafts = (drafts, *self._draft_memory)
        self._of_target = (target, np.zeros(5), np.ones(2))
        corrected = np.empty_like(drafts)
        for base, values, costs in zip(drafts, self._draft_memory[1], corrected, strict=True):
            _rescale(base, values, costs)
        self.costs = Costs(target.copy(), self._graph, self._deviations, corrected, *self._traits)
        """Of the moment; arrays that are kept in place."""
        self.columns = tuple(self.costs)
        """The same, as each call from Python takes it fastest."""

    def observe(
        self, shape: tuple[float, ...], mode: ExecutionMode, target_s: float, outside_s: float, verified: int,
        plan: DraftPlan, context: Ints, draft_s: Floats,
    ) -> tuple[float, float]:  # fmt: skip
        """Learn from a finished step. Returns what plain decoding takes for the requests that decode, 0 for none, and
        what the prompts of the step add, as is known now; NaN when one of the times is absurd and was dropped.

        shape: fields of the `Shape` that the target's pass had without its proposals, all floats. target_s: the
        device's own time of it. outside_s: the wall's without the drafts; NaN where nobody measured the device.
        context: (N,), of the step. draft_s: (D,), of the drafts at its end; NaN: it did not run.
        """
        row = ROWS[mode]
        if self.learning:
            self._learn(_verifying(Shape(*shape), verified), row, target_s)
        return _observe(
            self.columns, self._of_target, self._of_drafts, self._absurd, row, shape, (target_s, outside_s), verified,
            (plan.feed, plan.asked, plan.passes, plan.widths, context), draft_s,
        )  # fmt: skip

    def _learn(self, shape: Shape, row: int, target_s: float) -> None:
        base, _, values = self._of_target
        plausible = _plausible(target_s, _predicted_s(base, values, row, shape), self._absurd.copy())
        if plausible and self._learned.observe(shape, target_s):
            self._take(_rows({ExecutionMode.RAGGED: self._learned.cost}))


def _rows(target: Mapping[ExecutionMode, StepCost]) -> Floats:
    """(3, 8). A mode that was not measured uses the one that behaves most like it."""
    order = (ExecutionMode.RAGGED, *MODES)
    known = [next((target[one] for one in (mode, *order) if one in target), StepCost()) for mode in MODES]
    return np.array([cost.coefficients() for cost in known])


def _draft_rows(drafter: Drafter, profiled: Mapping[str, DrafterCost], model: Floats) -> tuple[Floats, Floats]:
    """(8,) of a pass and of what the first one costs beyond it: as profiled, else a guess; model: that of a model."""
    nothing = np.zeros(len(model))
    if drafter.name in profiled:
        cost = profiled[drafter.name]
        return cost.cost.coefficients(), cost.first_pass.coefficients()
    return (model if drafter.passes else StepCost(constant_s=LOOKUP_S).coefficients()), nothing


def _passes(drafter: Drafter, profiled: Mapping[str, DrafterCost]) -> bool:
    found = profiled.get(drafter.name)
    return drafter.passes if found is None else found.autoregressive
