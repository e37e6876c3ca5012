"""Step times as the controller believes them now: the profile (or what was learned), corrected online.

Target and drafters are corrected apart: one common factor would cancel in the argmax and change nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from outrider_runtime.control.batch import ExecutionMode
from outrider_runtime.control.choice import TargetPrice
from outrider_runtime.control.costs import DrafterCost, LatencyModel, Shape, StepCost
from outrider_runtime.control.deviation import Deviations, PromptTimes, StepKind
from outrider_runtime.control.learned_cost import LearnedCost
from outrider_runtime.control.least_squares import Multipliers
from outrider_runtime.control.settings import DrafterSpec

ABSURD_FACTOR = 8.0
ABSURD_S = 1.0
"""A step that took longer than both says that the machine slept, not what a step costs."""
ABSURD_RUN = 8
"""So many in a row are no accident: the costs have changed."""
WINSOR_FACTOR = 2.5
"""One slow step counts as at most so many times its prediction."""
NEURAL_SHARE = 0.15
"""A draft's pass before its first measurement, as a share of the target's."""
LOOKUP_S = 2e-4
"""A prompt lookup before its first measurement."""


class OnlineLatency:
    """Predicts target and draft times, and learns from each step."""

    def __init__(
        self, model: LatencyModel | None, drafters: tuple[DrafterSpec, ...], largest_graph_tokens: int | None
    ) -> None:
        self._profile = dict(model.target) if model is not None else {}
        self._draft_profile = dict(model.drafters) if model is not None else {}
        self._neural = {drafter.name: drafter.neural for drafter in drafters}
        self._largest_graph = math.inf if largest_graph_tokens is None else float(largest_graph_tokens)
        self._learned = LearnedCost()
        self._target_scale = _target_multipliers()
        self._draft_scale = {
            drafter.name: Multipliers(half_life=12, strength=0.3, likeness=1.0) for drafter in drafters
        }
        self._catch_up_scale = Multipliers(half_life=12, strength=0.3, likeness=1.0)
        """On top of the draft's: a long pass over old tokens need not cost what ordinary drafting taught."""
        self._deviations = Deviations()
        self._prompt_times = PromptTimes()
        self._absurd_run = 0
        self._cache: dict[ExecutionMode, StepCost] = {}
        self._draft_cache: dict[str, DrafterCost] = {}

    @property
    def learning(self) -> bool:
        """True while no profile of the target is there."""
        return not self._profile

    def target_s(self, shape: Shape, mode: ExecutionMode) -> float:
        return self._corrected(mode).seconds(shape)

    def price(self, base: Shape, *, uniform: bool) -> TargetPrice:
        """What the target's pass costs around the batch `base`, which holds no proposals yet.

        `uniform`: whether a step in which all requests verify equally many can run as such (no prefill in it).
        """
        ragged = self._corrected(ExecutionMode.RAGGED)
        even = self._corrected(ExecutionMode.UNIFORM) if uniform else None
        beyond = self._corrected(ExecutionMode.BEYOND_GRAPH) if math.isfinite(self._largest_graph) else None
        requests = round(base.n_requests)
        plain_more_s = self._deviations.seconds(StepKind.PLAIN, requests)
        # A step that verifies does all that a plain one does. Where it seems to take less, the plain ones came in a
        # slow spell of the machine, and speculation would look free.
        ragged_more_s = max(plain_more_s, self._deviations.seconds(StepKind.RAGGED, requests))
        even_more_s = ragged_more_s
        if even is not None:
            even_more_s = max(plain_more_s, self._deviations.seconds(StepKind.EVEN, requests))
        return TargetPrice(
            n_batched=base.n_batched,
            uniform=_decoding(even) if even is not None else None,
            ragged=_decoding(ragged),
            beyond=_decoding(beyond) if beyond is not None else None,
            largest_graph_tokens=self._largest_graph,
            fixed_uniform_s=(even or ragged).without_tokens_s(base) + even_more_s,
            fixed_ragged_s=ragged.without_tokens_s(base) + ragged_more_s,
            fixed_beyond_s=beyond.without_tokens_s(base) if beyond is not None else 0.0,
            plain_more_s=0.0 if base.n_batched > self._largest_graph else plain_more_s - even_more_s,
            logits_s=ragged.per_logits_token_s,
            prompt_factor=self._prompt_times.factor,
        )

    def plain_rate(self, decoding: Shape) -> float:
        """Tokens a second of requests that decode by themselves, nothing proposed; 0 while no cost is known. As
        `price` says it; asked for at every step."""
        beyond = decoding.n_batched > self._largest_graph
        seconds = self.target_s(decoding, ExecutionMode.BEYOND_GRAPH if beyond else ExecutionMode.UNIFORM)
        if not beyond:
            seconds += self._deviations.seconds(StepKind.PLAIN, round(decoding.n_requests))
        return decoding.n_requests / seconds if seconds > 0 else 0.0

    def draft_s(self, name: str, first: Shape, draft_tokens: int) -> float:
        """T_draft(K); `first` is the shape of the first pass (prompt lookup: the requests that are asked)."""
        return self._draft(name).seconds(first, draft_tokens)

    def draft_token_s(self, name: str, batched: float) -> float:
        """What one more token costs in a draft pass of so many."""
        return self._draft(name).token_s(batched)

    def observe_target(self, shape: Shape, mode: ExecutionMode, seconds: float) -> bool:
        """False when the time is absurd and was dropped."""
        predicted = self.target_s(shape, mode)
        if not self._plausible(seconds, predicted):
            return False
        if self.learning and self._learned.observe(shape, seconds):
            self._target_scale = _target_multipliers()
        cost = self._base(mode)
        total = cost.seconds(shape)
        if total > 0:
            most = WINSOR_FACTOR * max(predicted, total / WINSOR_FACTOR)
            self._target_scale.observe(cost.constant_s, total - cost.constant_s, min(seconds, most))
        self._cache.clear()
        self._draft_cache.clear()
        return True

    def observe_decoding(self, shape: Shape, mode: ExecutionMode, seconds: float, *, verifies: bool) -> None:
        """A step without prompts, `seconds` without its drafts: how steps of its kind deviate from the model."""
        if mode is ExecutionMode.BEYOND_GRAPH:
            return
        kind = StepKind.PLAIN
        if verifies:
            kind = StepKind.EVEN if mode is ExecutionMode.UNIFORM else StepKind.RAGGED
        self._deviations.observe(kind, round(shape.n_requests), seconds, self.target_s(shape, mode))

    def observe_prompts(self, decoding: Shape, verified: int, tokens: int, seconds: float) -> None:
        """A step of `seconds` without its drafts that read `tokens` of prompts. decoding: the rest of it, less what
        it verified."""
        price = self.price(decoding, uniform=True)
        expected_s = float(price.prompt_s(verified, np.array(float(tokens)))) / price.prompt_factor
        self._prompt_times.observe(seconds - price.decode_s(verified), expected_s)

    def observe_draft(self, name: str, first: Shape, draft_tokens: int, seconds: float) -> bool:
        """False when the time is absurd and was dropped."""
        if name not in self._draft_scale:
            return False
        predicted, parts = self.draft_s(name, first, draft_tokens), self._draft_parts(name, first, draft_tokens)
        if not _learn(self._draft_scale[name], parts, seconds, predicted):
            return False
        self._draft_cache.clear()
        return True

    def catch_up_s(self, name: str, shape: Shape) -> float:
        """T_d(N_context, N_batched) of the draft alone over tokens that it has not seen (`Shape`: of these)."""
        constant, slope = self._catch_up_scale.values
        calls, tokens = _pass_parts(self._draft(name), shape)
        return constant * calls + slope * tokens

    def observe_catch_up(self, name: str, shape: Shape, seconds: float) -> bool:
        """False when the time is absurd and was dropped. What ordinary drafting costs stays as it is."""
        parts = _pass_parts(self._draft(name), shape)
        return _learn(self._catch_up_scale, parts, seconds, self.catch_up_s(name, shape))

    def _plausible(self, seconds: float, predicted: float) -> bool:
        if not _is_time(seconds):
            return False
        if seconds <= max(ABSURD_S, ABSURD_FACTOR * predicted) or predicted <= 0:
            self._absurd_run = 0
            return True
        self._absurd_run += 1
        return self._absurd_run > ABSURD_RUN

    def _base(self, mode: ExecutionMode) -> StepCost:
        """Uncorrected; a mode that was not measured uses the one that behaves most like it."""
        if not self._profile:
            return self._learned.cost
        order = (mode, ExecutionMode.RAGGED, ExecutionMode.UNIFORM, ExecutionMode.BEYOND_GRAPH)
        return next(self._profile[one] for one in order if one in self._profile)

    def _corrected(self, mode: ExecutionMode) -> StepCost:
        cost = self._cache.get(mode)
        if cost is None:
            constant, slope = self._target_scale.values
            cost = self._cache[mode] = _scaled(self._base(mode), constant, slope)
        return cost

    def _draft(self, name: str) -> DrafterCost:
        """Corrected."""
        drafter = self._draft_cache.get(name)
        if drafter is None:
            constant, slope = self._draft_scale[name].values
            base = self._draft_base(name)
            cost, first = _scaled(base.cost, constant, slope), _scaled(base.first_pass, constant, slope)
            drafter = DrafterCost(cost, base.autoregressive, first)
            self._draft_cache[name] = drafter
        return drafter

    def _draft_parts(self, name: str, first: Shape, draft_tokens: int) -> tuple[float, float]:
        """The part that is there at each call, and the part that grows with the call's tokens."""
        drafter = self._draft_base(name)
        constant, first_pass = (StepCost(constant_s=one.constant_s) for one in (drafter.cost, drafter.first_pass))
        calls = DrafterCost(constant, drafter.autoregressive, first_pass).seconds(first, draft_tokens)
        return calls, drafter.seconds(first, draft_tokens) - calls

    def _draft_base(self, name: str) -> DrafterCost:
        """Uncorrected: as profiled, else a guess from the target's cost."""
        if name in self._draft_profile:
            return self._draft_profile[name]
        if not self._neural[name]:
            return DrafterCost(StepCost(constant_s=LOOKUP_S), autoregressive=False)
        target = self._base(ExecutionMode.RAGGED)
        return DrafterCost(_scaled(target, NEURAL_SHARE, NEURAL_SHARE), autoregressive=True)


def _learn(scale: Multipliers, parts: tuple[float, float], seconds: float, predicted: float) -> bool:
    """Correct a draft's cost by what one call took; False when that is absurd and was dropped.

    parts: seconds of any call, and those that grow with its tokens, uncorrected by `scale`.
    """
    if not _is_time(seconds) or seconds > max(ABSURD_S, ABSURD_FACTOR * predicted):
        return False
    if sum(parts) > 0:
        scale.observe(*parts, min(seconds, WINSOR_FACTOR * predicted))
    return True


def _pass_parts(drafter: DrafterCost, shape: Shape) -> tuple[float, float]:
    """Seconds of one first pass: those of any call, and those that grow with its tokens."""
    constant_s = drafter.cost.constant_s + drafter.first_pass.constant_s
    return constant_s, drafter.seconds(shape, 1) - constant_s


def _target_multipliers() -> Multipliers:
    """Noise comes in spells of many steps, so a window of 70 holds only a few spells: unlikeness needs good reasons."""
    return Multipliers(half_life=50, strength=0.3, likeness=8.0)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0


def _decoding(cost: StepCost) -> StepCost:
    """The same for tokens that all have their logits computed."""
    if not cost.per_logits_token_s:
        return cost
    return replace(cost, per_batched_token_s=cost.per_batched_token_s + cost.per_logits_token_s, per_logits_token_s=0.0)


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
