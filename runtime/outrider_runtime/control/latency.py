"""Step times as the controller believes them now: the profile (or what was learned), corrected online.

Target and drafters are corrected apart, as one common factor would cancel in the argmax. What the correction of the
target leaves is learned for each kind of step: there lies the model's error at the crossover, and the time that no
device reports (the scheduler's, which is longer in a step that verifies).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from outrider_runtime.control.batch import Bools, Floats
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.corrections import (
    EVEN,
    PLAIN,
    UNEVEN,
    Deviations,
    Multipliers,
    deviations,
    error_s,
    scaled,
    size,
)
from outrider_runtime.control.cost import (
    BATCHED,
    CONSTANT,
    QUERY,
    DrafterCost,
    LatencyModel,
    Shape,
    StepCost,
    pass_s,
    token_s,
)
from outrider_runtime.control.fit import LearnedCost
from outrider_runtime.control.plans import ExecutionMode
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
MOST_ERROR = 0.02
"""Of a plain step: what an argmax may lose to a model that was never checked."""
PROMPT_FACTORS = (0.5, 3.0)
"""Of what the model says, that prompts may lengthen a step by."""
PROMPT_HALF_LIFE, PROMPT_PRIOR = 300.0, 8.0
UNIFORM, RAGGED, BEYOND = range(3)
MODES = (ExecutionMode.UNIFORM, ExecutionMode.RAGGED, ExecutionMode.BEYOND_GRAPH)
"""The rows of the target's coefficients."""


@compiled
def _step_s(
    costs: Floats, graph: float, more_s: tuple[float, float, float], shape: Shape, proposals: float, even: bool
) -> float:  # fmt: skip
    """Seconds of the target's pass of `shape` and its proposals, equally many for each request if `even`. Past the
    largest graph other coefficients hold, and no deviation is known."""
    if shape.n_batched + proposals > graph:
        return pass_s(costs[BEYOND], shape, proposals)
    plain = proposals == 0.0
    row = UNIFORM if even or (plain and shape.n_prompt == 0.0) else RAGGED
    return pass_s(costs[row], shape, proposals) + more_s[PLAIN if plain else EVEN if even else UNEVEN]


@compiled
def _decode_s(costs: Floats, graph: float, sums: Floats, of_size: int, shape: Shape, proposals: float) -> float:
    return _step_s(costs, graph, deviations(sums, of_size), shape, proposals, False)


@compiled
def _price(
    costs: Floats, graph: float, sums: Floats, of_size: int, shape: Shape, most: int
) -> tuple[Floats, Floats, float, float]:  # fmt: skip
    """Two (most+1,): seconds with 0, 1, .. `most` proposals of unequal lengths, and equally many for every request.
    Then what a proposal costs at first, and the model's error."""
    more_s = deviations(sums, of_size)
    uneven, even = np.empty(most + 1), np.full(most + 1, np.inf)
    for proposals in range(most + 1):
        uneven[proposals] = _step_s(costs, graph, more_s, shape, float(proposals), False)
        if shape.n_prompt == 0.0:
            even[proposals] = _step_s(costs, graph, more_s, shape, float(proposals), True)
    even[0] = uneven[0]
    first_s = token_s(costs[BEYOND if shape.n_batched > graph else RAGGED], shape.n_batched)
    return uneven, even, first_s, min(MOST_ERROR * uneven[0], error_s(sums, of_size))


@compiled
def _draft_columns(
    costs: Floats, passes: Bools, reads: Bools, context: float, decoding: float, prompts: float
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """See `Latency.draft_columns`. costs: (D, 2, 8)."""
    drafters = len(costs)
    first_s, more_s, each_s = np.zeros(drafters), np.zeros(drafters), np.zeros(drafters)
    shape = Shape(context, decoding, decoding, context / 1000, 0.0)
    for d in range(drafters):
        once = pass_s(costs[d, 0], shape, 0.0)
        each_s[d] = (token_s(costs[d, 0], decoding) + token_s(costs[d, 1], decoding)) * reads[d]
        first_s[d] = once + pass_s(costs[d, 1], shape, 0.0) + each_s[d] * prompts
        more_s[d] = once * passes[d]
    return first_s, more_s, each_s


class Latency:
    """Predicts target and draft times, and learns from each step. D drafters."""

    def __init__(self, model: LatencyModel | None, settings: Settings) -> None:
        model = model or LatencyModel({})
        self.learning = not model.target
        """No profile of the target is there."""
        self._drafters, self._profiled = settings.drafters, model.drafters
        self._graph = math.inf if settings.largest_graph_tokens is None else float(settings.largest_graph_tokens)
        self._passes = np.array([_passes(one, model.drafters) for one in settings.drafters], dtype=bool)
        self._reads = np.array([one.reads for one in settings.drafters], dtype=bool)
        self._learned = LearnedCost()
        self._target_scale = _target_multipliers()
        self._draft_scales = [Multipliers(half_life=12, strength=0.3, likeness=1.0) for _ in settings.drafters]
        self._deviations = Deviations()
        self._prompt = (0.0, 0.0, 0.0)  # weight, seconds, predicted seconds
        self._absurd_run = 0
        self._take(_rows(model.target))

    def _take(self, target: Floats) -> None:
        """target: (3, 8), uncorrected. What is not known of a drafter follows from it."""
        self._base = target
        self._costs = self._target_scale.on(target)
        model = scaled(target[RAGGED], MODEL_SHARE, MODEL_SHARE)
        rows = [_draft_rows(one, self._profiled, model) for one in self._drafters]
        self._draft_base = np.array(rows).reshape(-1, 2, len(model))
        self._draft_costs = self._draft_base.copy()
        for drafter, scale in enumerate(self._draft_scales):
            self._draft_costs[drafter] = scale.on(self._draft_base[drafter])

    # -- what is predicted --------------------------------------------------------------------------------------

    def price(self, shape: Shape, node_s: Floats, rate: float, most: int) -> Price:
        """What a step takes around `shape`, which holds no proposals yet, with up to `most` of them. A step with
        prompts has no uniform form."""
        ragged_s, uniform_s, first_s, wrong_s = _price(
            self._costs, self._graph, self._deviations.sums, size(shape.n_requests), shape, most
        )
        return Price(ragged_s, uniform_s, node_s, rate, first_s, wrong_s)

    @property
    def context_query_s(self) -> float:
        """What a further query token costs for each 1000 tokens of its request's context."""
        return float(self._costs[RAGGED, QUERY])

    def decode_s(self, shape: Shape, proposals: float) -> float:
        """Seconds of the target's pass of `shape` and so many proposals of unequal lengths."""
        return _decode_s(
            self._costs, self._graph, self._deviations.sums, size(shape.n_requests), shape, float(proposals)
        )

    def prompt_s(self, shape: Shape, proposals: float, tokens: float) -> float:
        """By how much `tokens` of prompts lengthen a step of `shape` that verifies so many proposals."""
        longer = shape._replace(n_batched=shape.n_batched + tokens, n_prompt=shape.n_prompt + tokens)
        seconds = self.decode_s(longer, proposals) - self.decode_s(shape, proposals)
        return self.prompt_factor * max(seconds, float(self._costs[RAGGED, BATCHED]) * tokens)

    def plain_rate(self, shape: Shape) -> float:
        """Tokens a second of requests that decode by themselves, nothing proposed; 0 while no cost is known."""
        seconds = self.decode_s(shape, 0)
        return shape.n_requests / seconds if seconds > 0 else 0.0

    def draft_columns(self, context: float, decoding: float, prompts: float = 0.0) -> tuple[Floats, Floats, Floats]:
        """Three (D,) of seconds: the first pass over a token a request, or a call, and over `prompts` tokens; each pass
        more; a token in a first pass, of those that read."""
        return _draft_columns(self._draft_costs, self._passes, self._reads, context, decoding, prompts)

    def draft_s(self, drafter: int, first: Shape, passes: int) -> float:
        """T_d(passes, fed); `first` is the shape of the first pass (prompt lookup: the requests that are asked)."""
        return self._draft_scales[drafter](*self._draft_parts(drafter, first, passes))

    def _draft_parts(self, drafter: int, first: Shape, passes: int) -> tuple[float, float]:
        """Seconds of the calls and of the tokens, uncorrected."""
        each, more = self._draft_base[drafter]
        further = max(0, passes - 1) if self._passes[drafter] else 0
        later = Shape(first.n_context, first.n_requests, first.n_requests, first.n_context / 1000)
        calls = float((1 + further) * each[CONSTANT] + more[CONSTANT])
        total = pass_s(each, first, 0.0) + pass_s(more, first, 0.0)
        return calls, total + (further * pass_s(each, later, 0.0) if further else 0.0) - calls

    # -- what is learned ----------------------------------------------------------------------------------------

    def observe_target(self, shape: Shape, mode: ExecutionMode, seconds: float) -> bool:
        """The device's own time of a target pass. False when it is absurd and was dropped."""
        row = MODES.index(mode)
        predicted = pass_s(self._costs[row], shape, 0.0)
        if not self._plausible(seconds, predicted):
            return False
        if self.learning and self._learned.observe(shape, seconds):
            self._target_scale = _target_multipliers()
            self._take(_rows({ExecutionMode.RAGGED: self._learned.cost}))
        constant, total = float(self._base[row, CONSTANT]), pass_s(self._base[row], shape, 0.0)
        if total > 0:
            most = WINSOR_FACTOR * max(predicted, total / WINSOR_FACTOR)
            self._target_scale.observe(constant, total - constant, min(seconds, most))
            self._costs = self._target_scale.on(self._base)
        return True

    def observe_decoding(self, shape: Shape, mode: ExecutionMode, seconds: float, proposals: int) -> None:
        """A step without prompts, `seconds` of wall time without its drafts."""
        if mode is ExecutionMode.BEYOND_GRAPH:
            return
        kind = PLAIN if not proposals else EVEN if mode is ExecutionMode.UNIFORM else UNEVEN
        predicted = pass_s(self._costs[MODES.index(mode)], shape, 0.0)
        self._deviations.observe(kind, shape.n_requests, seconds, predicted)

    def observe_prompts(self, decoding: Shape, proposals: int, tokens: float, seconds: float) -> None:
        """A step of `seconds` without its drafts that read `tokens` of prompts; decoding: the rest of it, without its
        proposals."""
        expected_s = self.prompt_s(decoding, proposals, tokens) / self.prompt_factor
        longer_s = seconds - self.decode_s(decoding, proposals)
        least, most = (factor * expected_s for factor in PROMPT_FACTORS)
        keep = 0.5 ** (1 / PROMPT_HALF_LIFE)
        weight, took_s, predicted_s = self._prompt
        longer_s = min(max(longer_s, least), most)
        self._prompt = (keep * weight + 1.0, keep * took_s + longer_s, keep * predicted_s + expected_s)

    def observe_draft(self, drafter: int, first: Shape, passes: int, seconds: float) -> bool:
        """False when the time is absurd and was dropped."""
        calls, tokens = self._draft_parts(drafter, first, passes)
        predicted = self._draft_scales[drafter](calls, tokens)
        if not _is_time(seconds) or seconds > max(ABSURD_S, ABSURD_FACTOR * predicted):
            return False
        if calls + tokens > 0:
            self._draft_scales[drafter].observe(calls, tokens, min(seconds, WINSOR_FACTOR * predicted))
            self._draft_costs[drafter] = self._draft_scales[drafter].on(self._draft_base[drafter])
        return True

    @property
    def prompt_factor(self) -> float:
        """How much longer prompts make a step than the model says: a ratio of means, shrunk to 1."""
        weight, took_s, predicted_s = self._prompt
        if predicted_s <= 0:
            return 1.0
        prior_s = PROMPT_PRIOR * predicted_s / weight
        return (took_s + prior_s) / (predicted_s + prior_s)

    def _plausible(self, seconds: float, predicted: float) -> bool:
        if not _is_time(seconds):
            return False
        if seconds <= max(ABSURD_S, ABSURD_FACTOR * predicted) or predicted <= 0:
            self._absurd_run = 0
            return True
        self._absurd_run += 1
        return self._absurd_run > ABSURD_RUN


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


def _target_multipliers() -> Multipliers:
    """Noise comes in spells of many steps, so a window of 70 holds only a few spells: unlikeness needs good reasons."""
    return Multipliers(half_life=50, strength=0.3, likeness=8.0)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
