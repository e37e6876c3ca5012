"""Step times as the controller believes them now: the profile (or what was learned), corrected online.

Target and drafters are corrected apart, as one common factor would cancel in the argmax. What the correction of the
target leaves is learned for each kind of step: there lies the model's error at the crossover, and the time that no
device reports (the scheduler's, which is longer in a step that verifies).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from outrider_runtime.core.batch import Floats
from outrider_runtime.core.compiled import compiled
from outrider_runtime.core.cost import DrafterCost, LatencyModel, Shape, StepCost
from outrider_runtime.core.fit import LearnedCost
from outrider_runtime.core.plans import ExecutionMode
from outrider_runtime.core.settings import Settings
from outrider_runtime.core.value import Price

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
PLAIN, EVEN, UNEVEN = range(3)
"""Kinds of step: nothing is verified, equally many for every request, or not."""
SIZES = 14
"""Powers of two of the batch size that are told apart."""


class Multipliers:
    """Recursive least squares with forgetting on a cost of two parts: `y ~ m_1 * part_1 + m_2 * part_2`.

    Parts are seconds as a model predicts them, so both multipliers are 1 where the model is right. Errors are
    relative to the prediction. The prior says that the multipliers' mean is 1, worth `strength` observations, and that
    they are equal, worth `likeness`: a machine that slows down slows both parts, and only data that tell them apart
    part them. Directions that the last data do not show return there instead of drifting.
    """

    def __init__(self, *, half_life: float, strength: float, likeness: float) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self._strength, self._likeness = strength, likeness
        self._sums = (0.0,) * 5  # plain floats: arrays of two would cost fifty times as much
        self.values = (1.0, 1.0)

    def observe(self, first: float, second: float, seconds: float) -> None:
        """One observation: the parts as predicted, their sum positive, and what was measured."""
        total, keep = first + second, self._keep
        x, y, target = first / total, second / total, seconds / total
        news = (x * x, x * y, y * y, x * target, y * target)
        self._sums = tuple(keep * old + new for old, new in zip(self._sums, news, strict=True))
        self.values = self._solve()

    def _solve(self) -> tuple[float, float]:
        """The non-negative solution of the normal equations, the prior included:
        `strength * ((m_1 + m_2) / 2 - 1)^2 + likeness * (m_1 - m_2)^2`."""
        a11, a12, a22, b1, b2 = self._sums
        mean, like = self._strength / 4, self._likeness
        a11, a12, a22 = a11 + mean + like, a12 + mean - like, a22 + mean + like
        b1, b2 = b1 + 2 * mean, b2 + 2 * mean
        determinant = a11 * a22 - a12 * a12  # positive: the prior makes it so
        first, second = (a22 * b1 - a12 * b2) / determinant, (a11 * b2 - a12 * b1) / determinant
        if first < 0:
            return 0.0, max(0.0, b2 / a22)
        return (max(0.0, b1 / a11), 0.0) if second < 0 else (first, second)


class Deviations:
    """What the model gets wrong about steps of a kind at a size of batch: a mean that is shrunk to the kind's at other
    sizes, that to the mean of all kinds, and that to none. So what all kinds share does not count for those alone that
    were seen, or the others would look cheap."""

    HALF_LIFE_STEPS = 300.0
    PRIOR_STEPS = 8.0
    MOST_SHARE = 0.5
    """Of the predicted time, that one step may deviate by: the rest is an accident."""

    def __init__(self) -> None:
        self._keep = 0.5 ** (1 / self.HALF_LIFE_STEPS)
        self._sums = np.zeros((3, SIZES, 3))  # [kind, size, (weight, deviation, squared surprise)]

    def observe(self, kind: int, requests: int, seconds: float, predicted_s: float) -> None:
        """A decoding step's time without its drafts, and what the model says of it."""
        most = self.MOST_SHARE * predicted_s
        deviation = min(max(seconds - predicted_s, -most), most)
        _add_deviation(self._sums, self._keep, kind, _size(requests), deviation, self.PRIOR_STEPS)

    def seconds(self, requests: int) -> tuple[float, float, float]:
        """To be added to the model's prediction of each kind. A step that verifies does all that a plain one does:
        where it seems to take less, the plain ones came in a slow spell of the machine."""
        plain, even, uneven = _every_deviation(self._sums, _size(requests), self.PRIOR_STEPS)
        return plain, max(plain, even), max(plain, uneven)

    def error_s(self, requests: int) -> float:
        """Standard error of a step that verifies against a plain one of about so many requests; NaN where one of the
        kinds was never seen."""
        weight, _, squares = self._sums[:, _size(requests)].T
        verifies = weight[EVEN] + weight[UNEVEN]
        if weight[PLAIN] < 2 or verifies < 2:
            return math.nan
        plain = squares[PLAIN] / weight[PLAIN] ** 2
        return math.sqrt(plain + (squares[EVEN] + squares[UNEVEN]) / verifies**2)


def _size(requests: int) -> int:
    return min(requests.bit_length(), SIZES - 1)


@compiled
def _deviation(sums: Floats, kind: int, size: int, prior: float) -> float:
    weight = total = kind_weight = kind_total = 0.0
    for k in range(sums.shape[0]):
        for s in range(sums.shape[1]):
            weight += sums[k, s, 0]
            total += sums[k, s, 1]
            if k == kind:
                kind_weight += sums[k, s, 0]
                kind_total += sums[k, s, 1]
    own_weight, own = sums[kind, size, 0], sums[kind, size, 1]
    mean = (total - kind_total) / (weight - kind_weight + prior)
    mean = (kind_total - own + prior * mean) / (kind_weight - own_weight + prior)
    return float((own + prior * mean) / (own_weight + prior))


@compiled
def _every_deviation(sums: Floats, size: int, prior: float) -> tuple[float, float, float]:
    return (
        _deviation(sums, PLAIN, size, prior), _deviation(sums, EVEN, size, prior), _deviation(sums, UNEVEN, size, prior)
    )  # fmt: skip


@compiled
def _add_deviation(sums: Floats, keep: float, kind: int, size: int, deviation: float, prior: float) -> None:
    surprise = deviation - _deviation(sums, kind, size, prior)
    sums *= keep
    sums[kind, size, 0] += 1.0
    sums[kind, size, 1] += deviation
    sums[kind, size, 2] += surprise * surprise


Coefficients = tuple[float, float, float, float]
"""Of a pass: fixed seconds, those of a token, those of a token above the knee, the knee."""


@compiled
def _seconds(tokens: float, more_s: float, graph: float, cost: Coefficients, beyond: Coefficients) -> float:
    """Of a pass of so many tokens; past the largest graph other coefficients hold, and no deviation is known."""
    fixed_s, token_s, above_s, knee = beyond if tokens > graph else cost
    seconds = fixed_s + token_s * tokens + above_s * max(0.0, tokens - knee)
    return float(seconds if tokens > graph else seconds + more_s)


@compiled
def _tables(
    most: int, first: float, prompts: bool, graph: float, uniform: Coefficients, ragged: Coefficients,
    beyond: Coefficients, more_s: tuple[float, float, float],
) -> tuple[Floats, Floats]:  # fmt: skip
    """Seconds of a pass of `first` tokens and 0, 1, .. `most` proposals: of unequal lengths, and equally many for every
    request. Without any it is plain decoding; with prompts in it, it has no uniform form. more_s: see `Deviations`."""
    uneven, even = np.empty(most + 1), np.full(most + 1, np.inf)
    uneven[0] = even[0] = _seconds(first, more_s[PLAIN], graph, ragged if prompts else uniform, beyond)
    for proposals in range(1, most + 1):
        uneven[proposals] = _seconds(first + proposals, more_s[UNEVEN], graph, ragged, beyond)
        if not prompts:
            even[proposals] = _seconds(first + proposals, more_s[EVEN], graph, uniform, beyond)
    return uneven, even


class Latency:
    """Predicts target and draft times, and learns from each step."""

    def __init__(self, model: LatencyModel | None, settings: Settings) -> None:
        self._profile = dict(model.target) if model is not None else {}
        self._drafters = settings.drafters
        profiled = dict(model.drafters) if model is not None else {}
        self._draft_profile = [profiled.get(drafter.name) for drafter in settings.drafters]
        graph = settings.largest_graph_tokens
        self._graph = math.inf if graph is None else float(graph)
        self._learned = LearnedCost()
        self._target_scale = _target_multipliers()
        self._draft_scale = [Multipliers(half_life=12, strength=0.3, likeness=1.0) for _ in settings.drafters]
        self._deviations = Deviations()
        self._prompt = (0.0, 0.0, 0.0)  # weight, seconds, predicted seconds
        self._absurd_run = 0
        self._corrected: dict[ExecutionMode, StepCost] = {}
        self._draft_corrected: list[DrafterCost | None] = [None] * len(settings.drafters)

    @property
    def learning(self) -> bool:
        """True while no profile of the target is there."""
        return not self._profile

    def price(self, base: Shape, node_s: Floats, rate: float, most: int) -> Price:
        """What a step takes around `base`, which holds no proposals yet, with up to `most` of them. A step with prompts
        has no uniform form."""
        requests = round(base.n_requests)
        uniform, ragged = self.cost(ExecutionMode.UNIFORM), self.cost(ExecutionMode.RAGGED)
        beyond = self.cost(ExecutionMode.BEYOND_GRAPH)
        ragged_table, uniform_table = _tables(
            most, float(base.n_batched), base.n_prompt > 0, self._graph, _coefficients(uniform, base),
            _coefficients(ragged, base), _coefficients(beyond, base), self._deviations.seconds(requests),
        )  # fmt: skip
        plain = ragged_table[0]
        last = base.n_batched + most
        token_s = ragged.token_s(base.n_batched) + ragged.per_logits_token_s
        dear_s = ragged.token_s(last - 1) + ragged.per_logits_token_s
        if last > self._graph:
            dear_s = beyond.token_s(last) + beyond.per_logits_token_s
            token_s = token_s if base.n_batched <= self._graph else dear_s
        error_s, limit = self._deviations.error_s(requests), MOST_ERROR * float(plain)
        error_s = limit if math.isnan(error_s) else min(error_s, limit)
        return Price(ragged_table, uniform_table, node_s, rate, token_s, dear_s, error_s)

    @property
    def context_query_s(self) -> float:
        """What a further query token costs for each 1000 tokens of its request's context."""
        return self.cost(ExecutionMode.RAGGED).per_context_query_s

    def cost(self, mode: ExecutionMode) -> StepCost:
        """Corrected; a mode that was not measured uses the one that behaves most like it."""
        found = self._corrected.get(mode)
        if found is None:
            found = self._corrected[mode] = _scaled(self._base(mode), *self._target_scale.values)
        return found

    def decode_s(self, base: Shape, proposals: int) -> float:
        """Seconds of the target's pass of `base` and so many proposals of unequal lengths."""
        more_s = self._deviations.seconds(round(base.n_requests))[UNEVEN if proposals else PLAIN]
        tokens = base.n_batched + proposals
        if tokens > self._graph:
            return self.cost(ExecutionMode.BEYOND_GRAPH).seconds(replace(base, n_batched=tokens))
        mode = ExecutionMode.RAGGED if proposals or base.n_prompt else ExecutionMode.UNIFORM
        cost = self.cost(mode)
        above = max(0.0, tokens - cost.knee_tokens) * cost.per_batched_token_above_knee_s
        token_s = cost.per_batched_token_s + cost.per_logits_token_s
        return cost.without_tokens_s(base) + token_s * tokens + above + more_s

    def prompt_s(self, base: Shape, proposals: int, tokens: float) -> float:
        """By how much `tokens` of prompts lengthen a step of `base` that verifies so many proposals."""
        ragged = self.cost(ExecutionMode.RAGGED)
        token_s = ragged.per_batched_token_s
        longer = replace(base, n_batched=base.n_batched + tokens, n_prompt=base.n_prompt + tokens)
        seconds = self.decode_s(longer, proposals) - self.decode_s(base, proposals)
        return self.prompt_factor * max(seconds, token_s * tokens)

    def plain_rate(self, base: Shape) -> float:
        """Tokens a second of requests that decode by themselves, nothing proposed; 0 while no cost is known."""
        seconds = self.decode_s(base, 0)
        return base.n_requests / seconds if seconds > 0 else 0.0

    def draft_s(self, drafter: int, first: Shape, passes: int) -> float:
        """T_d(passes, fed); `first` is the shape of the first pass (prompt lookup: the requests that are asked)."""
        return self.draft_cost(drafter).seconds(first, passes)

    def draft_cost(self, drafter: int) -> DrafterCost:
        """Corrected."""
        found = self._draft_corrected[drafter]
        if found is None:
            scale, base = self._draft_scale[drafter].values, self._draft_base(drafter)
            found = DrafterCost(_scaled(base.cost, *scale), base.autoregressive, _scaled(base.first_pass, *scale))
            self._draft_corrected[drafter] = found
        return found

    def observe_target(self, shape: Shape, mode: ExecutionMode, seconds: float) -> bool:
        """The device's own time of a target pass. False when it is absurd and was dropped."""
        predicted = self.cost(mode).seconds(shape)
        if not self._plausible(seconds, predicted):
            return False
        if self.learning and self._learned.observe(shape, seconds):
            self._target_scale = _target_multipliers()
        base = self._base(mode)
        total = base.seconds(shape)
        if total > 0:
            most = WINSOR_FACTOR * max(predicted, total / WINSOR_FACTOR)
            self._target_scale.observe(base.constant_s, total - base.constant_s, min(seconds, most))
        self._corrected.clear()
        if self.learning:
            self._draft_corrected = [None] * len(self._drafters)
        return True

    def observe_decoding(self, shape: Shape, mode: ExecutionMode, seconds: float, proposals: int) -> None:
        """A step without prompts, `seconds` of wall time without its drafts."""
        if mode is ExecutionMode.BEYOND_GRAPH:
            return
        kind = PLAIN if not proposals else EVEN if mode is ExecutionMode.UNIFORM else UNEVEN
        self._deviations.observe(kind, round(shape.n_requests), seconds, self.cost(mode).seconds(shape))

    def observe_prompts(self, decoding: Shape, proposals: int, tokens: int, seconds: float) -> None:
        """A step of `seconds` without its drafts that read `tokens` of prompts; decoding: the rest of it, without its
        proposals."""
        expected_s = self.prompt_s(decoding, proposals, tokens) / self.prompt_factor
        longer_s = seconds - self.decode_s(decoding, proposals)
        least, most = (factor * expected_s for factor in PROMPT_FACTORS)
        keep = 0.5 ** (1 / PROMPT_HALF_LIFE)
        news = (1.0, min(max(longer_s, least), most), expected_s)
        weight, took_s, predicted_s = (keep * old + new for old, new in zip(self._prompt, news, strict=True))
        self._prompt = (weight, took_s, predicted_s)

    def observe_draft(self, drafter: int, first: Shape, passes: int, seconds: float) -> bool:
        """False when the time is absurd and was dropped."""
        base, predicted = self._draft_base(drafter), self.draft_s(drafter, first, passes)
        if not _is_time(seconds) or seconds > max(ABSURD_S, ABSURD_FACTOR * predicted):
            return False
        calls = base.cost.constant_s * (max(1, passes) if base.autoregressive else 1) + base.first_pass.constant_s
        tokens = base.seconds(first, passes) - calls
        if calls + tokens > 0:
            self._draft_scale[drafter].observe(calls, tokens, min(seconds, WINSOR_FACTOR * predicted))
            self._draft_corrected[drafter] = None
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

    def _base(self, mode: ExecutionMode) -> StepCost:
        if not self._profile:
            return self._learned.cost
        order = (mode, ExecutionMode.RAGGED, ExecutionMode.UNIFORM, ExecutionMode.BEYOND_GRAPH)
        return next(self._profile[one] for one in order if one in self._profile)

    def _draft_base(self, drafter: int) -> DrafterCost:
        """Uncorrected: as profiled, else a guess from the target's cost."""
        profiled = self._draft_profile[drafter]
        if profiled is not None:
            return profiled
        if not self._drafters[drafter].passes:
            return DrafterCost(StepCost(constant_s=LOOKUP_S), autoregressive=False)
        return DrafterCost(_scaled(self._base(ExecutionMode.RAGGED), MODEL_SHARE, MODEL_SHARE))


def _coefficients(cost: StepCost, base: Shape) -> Coefficients:
    token_s = cost.per_batched_token_s + cost.per_logits_token_s
    above_s, knee = cost.per_batched_token_above_knee_s, cost.knee_tokens
    return float(cost.without_tokens_s(base)), float(token_s), float(above_s), float(knee)  # one type to compile for


def _target_multipliers() -> Multipliers:
    """Noise comes in spells of many steps, so a window of 70 holds only a few spells: unlikeness needs good reasons."""
    return Multipliers(half_life=50, strength=0.3, likeness=8.0)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0


def _scaled(cost: StepCost, constant: float, slope: float) -> StepCost:
    return StepCost(
        per_context_token_s=slope * cost.per_context_token_s,
        per_batched_token_s=slope * cost.per_batched_token_s,
        per_batched_token_above_knee_s=slope * cost.per_batched_token_above_knee_s,
        knee_tokens=cost.knee_tokens,
        per_request_s=slope * cost.per_request_s,
        per_context_query_s=slope * cost.per_context_query_s,
        per_logits_token_s=slope * cost.per_logits_token_s,
        constant_s=constant * cost.constant_s,
    )
