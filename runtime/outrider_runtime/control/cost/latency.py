"""Step times as the controller believes them now: the profile (or what was learned), corrected online.

Target and drafters are corrected apart, as one common factor would cancel in the argmax. D drafters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.correction import (
    DRAFT_MEMORY,
    TARGET_MEMORY,
    Believed,
    correct,
    rescale,
)
from outrider_runtime.control.cost.learned import LearnedCost
from outrider_runtime.control.cost.model import (
    CONSTANT,
    KNEE,
    DrafterCost,
    LatencyModel,
    Shape,
    StepCost,
    pass_s,
    without_prompts,
)
from outrider_runtime.control.cost.step_times import RAGGED, Costs, decode_s, is_block, later_pass, read_tokens
from outrider_runtime.control.data.batch import Floats, Ints
from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter, Settings

ABSURD_FACTOR, ABSURD_S = 8.0, 1.0
"""A step that took longer than both says that the machine slept, not what a step costs."""
ABSURD_RUN = 8
"""So many in a row are no accident: the costs have changed."""
LONGEST_PASS_S = 120.0
"""A pass that took longer is a fault of the clock, however often it is reported."""
WINSOR_FACTOR = 2.5
"""One slow step counts as at most so many times its prediction."""
MODEL_SHARE, LOOKUP_S = 0.15, 2e-4
"""Before its first measurement: a model's pass as a share of the target's, and a lookup's call."""
BLOCK_FEED_SHARE = 0.1
"""Feeding a block drafter before its first measurement, as a share of its pass: one projection against layers."""
MODES = (ExecutionMode.UNIFORM, ExecutionMode.RAGGED, ExecutionMode.BEYOND_GRAPH)
ROWS = {mode: row for row, mode in enumerate(MODES)}
"""Of the target's coefficients."""


class Memory(NamedTuple):
    """What is learned of step times, in place."""

    target: Believed
    drafts: Believed
    absurd: Ints
    """(1+D,): absurd times in a row, of the target and of each drafter."""


class Drafting(NamedTuple):
    """Of a step's `DraftPlan`, what its drafts took their time for; and (N,) the tokens that were cached."""

    feed: Ints
    asked: Ints
    passes: Ints
    widths: Ints
    context: Ints


@compiled
def _parts_s(target: Believed, row: int, shape: Shape) -> tuple[float, float, float]:
    """Seconds of the target's pass as profiled: of the constant, and of everything else; and as believed."""
    constant = target.base[row, CONSTANT]
    rest = pass_s(target.base[row], shape, 0.0) - constant
    return constant, rest, target.values[0] * constant + target.values[1] * rest


@compiled
def _plausible(seconds: float, predicted_s: float, absurd: Ints) -> bool:
    """Whether to believe it: absurd ones are counted, and believed when they go on. absurd: (1,), so many in a row."""
    if not 0.0 < seconds <= LONGEST_PASS_S:
        return False
    if seconds <= max(ABSURD_S, ABSURD_FACTOR * predicted_s) or predicted_s <= 0.0:
        absurd[0] = 0
        return True
    absurd[0] += 1
    return bool(absurd[0] > ABSURD_RUN)


@compiled
def _observe_target(target: Believed, absurd: Ints, row: int, shape: Shape, target_s: float) -> bool:
    """Whether the time is plausible."""
    constant, rest, predicted_s = _parts_s(target, row, shape)
    if not _plausible(target_s, predicted_s, absurd):
        return False
    # What the profile says is no accident, however little is believed at present.
    most_s = max(WINSOR_FACTOR * predicted_s, constant + rest)
    correct(target, TARGET_MEMORY, constant, rest, min(target_s, most_s))
    return True


@compiled
def _draft_parts_s(costs: Floats, first: Shape, further: int, width: int) -> tuple[float, float]:
    """Seconds of a drafter's calls and of its tokens: a `first` pass and so many further ones. costs: (2, 8)"""
    later = later_pass(first.n_context, first.n_requests, float(width))
    calls = (1 + further) * costs[0, CONSTANT] + costs[1, CONSTANT]
    total = pass_s(costs[0], first, 0.0) + pass_s(costs[1], first, 0.0) + further * pass_s(costs[0], later, 0.0)
    return calls, total - calls


@compiled
def _block_parts_s(costs: Floats, fed: Shape, proposes: bool) -> tuple[float, float]:
    """Seconds of a block drafter's calls and of its tokens: it is `fed`, and makes one pass where it proposes. costs:
    (2, 8), of the pass and of feeding."""
    calls, total = costs[1, CONSTANT], pass_s(costs[1], fed, 0.0)
    if proposes:
        calls += costs[0, CONSTANT]
        total += pass_s(costs[0], later_pass(fed.n_context, fed.n_requests, 1.0), 0.0)
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
        cached += read_tokens(context[i], budget) if takes_part else 0.0
    return Shape(cached, float(max(1, requests, fed)), float(max(1, requests)), cached / 1000, 0.0)


@compiled
def _observe_drafts(drafts: Believed, absurd: Ints, costs: Costs, plan: Drafting, seconds: Floats) -> bool:
    """Whether the times are plausible. absurd: (D,), absurd times in a row. seconds: (D,); NaN: it did not run."""
    feed, asked, passes, widths, context = plan
    plausible = True
    for d in range(len(seconds)):
        if not seconds[d] > 0.0:
            continue
        further = max(1, passes[d]) - 1 if costs.passes[d] else 0
        first = _first_pass(feed, asked, context, costs.budgets[d], d)
        own = Believed(drafts.base[d], drafts.sums[d], drafts.values[d], drafts.costs[d])
        if is_block(costs, d):
            calls, tokens = _block_parts_s(own.base, first, passes[d] > 0)
        else:
            calls, tokens = _draft_parts_s(own.base, first, further, widths[d])
        predicted = own.values[0] * calls + own.values[1] * tokens
        if _plausible(seconds[d], predicted, absurd[d : d + 1]):
            # After a run of absurd times the cost has changed: it is as long as it is, or each call costs users more.
            most_s = np.inf if absurd[d] > ABSURD_RUN else WINSOR_FACTOR * predicted
            correct(own, DRAFT_MEMORY, calls, tokens, min(seconds[d], most_s))
        else:
            plausible = False
    return plausible


@compiled
def observe_times(
    costs: Costs, memory: Memory, row: int, shape: Shape, target_s: float, verified: int, plan: Drafting,
    draft_s: Floats,
) -> tuple[float, float]:  # fmt: skip
    """Learn from a finished step. Returns what plain decoding takes for the requests that decode, 0 for none, and what
    the prompts of the step add, as is known now; NaN when one of the times is absurd and was dropped.

    row: of `MODES`. shape, target_s: of the target's pass, the shape without its proposals. draft_s: (D,), of the
    drafts at its end; NaN: it did not run.
    """
    plausible = _observe_target(memory.target, memory.absurd[:1], row, verifying(shape, verified), target_s)
    told = _observe_drafts(memory.drafts, memory.absurd[1:], costs, plan, draft_s)
    if not plausible or not told:
        return np.nan, 0.0
    return _plain_s(costs, shape)


@compiled
def verifying(shape: Shape, verified: int) -> Shape:
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
        model = _finite(model or LatencyModel({}))
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
        self._absurd = np.zeros(1 + len(settings.drafters), np.int64)
        self._take(_rows(model.target))

    def _take(self, target: Floats) -> None:
        """target: (3, 8), uncorrected. What is not known of a drafter follows from it."""
        model = MODEL_SHARE * target[RAGGED]
        model[KNEE] = target[RAGGED, KNEE]
        rows = [_draft_rows(one, self._profiled, target[RAGGED] if one.is_target else model) for one in self._drafters]
        drafts = np.array(rows).reshape(-1, 2, target.shape[1])
        self._memory = Memory(
            Believed(target, np.zeros(5), np.ones(2), target.copy()),
            Believed(drafts, *self._draft_memory, np.empty_like(drafts)), self._absurd,
        )  # fmt: skip
        for own in zip(*self._memory.drafts, strict=True):
            rescale(Believed(*own))
        costs = self._memory.target.costs, self._memory.drafts.costs
        self.costs = Costs(costs[0], self._graph, costs[1], *self._traits)
        """Of the moment; arrays that are kept in place."""
        self.columns = tuple(self.costs)
        """The same in a plain tuple, which a call unpacks faster."""
        self.memory = tuple(self._memory.target), tuple(self._memory.drafts), self._absurd
        """What it learns in, so too."""

    def learn(self, shape: Shape, row: int, target_s: float) -> None:
        """Where no profile says it, what the target's pass of this shape took says what a pass costs."""
        _, _, predicted_s = _parts_s(self._memory.target, row, shape)
        absurd = self._absurd[:1].copy()  # `observe_times` counts this step
        if _plausible(target_s, predicted_s, absurd) and self._learned.observe(shape, target_s):
            self._take(_rows({ExecutionMode.RAGGED: self._learned.cost}))


def _finite(model: LatencyModel) -> LatencyModel:
    """Leave out what is no cost: a coefficient that is not a number, or infinite, would be in every decision."""

    def is_cost(*costs: StepCost) -> bool:
        return all(bool(np.isfinite(cost.coefficients()).all()) for cost in costs)

    return LatencyModel(
        {mode: cost for mode, cost in model.target.items() if is_cost(cost)},
        {name: costs for name, costs in model.drafters.items() if is_cost(costs.cost, costs.first_pass)},
    )


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
    if drafter.is_block:
        return model, BLOCK_FEED_SHARE * model
    return (model if drafter.passes else StepCost(constant_s=LOOKUP_S).coefficients()), nothing


def _passes(drafter: Drafter, profiled: Mapping[str, DrafterCost]) -> bool:
    found = profiled.get(drafter.name)
    return drafter.passes if found is None else found.autoregressive
