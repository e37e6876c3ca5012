"""The observing half: everything that finished steps have taught, which the planning half reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import CatchUpOutcome, DraftPlan, RequestOutcome, StepOutcome
from outrider_runtime.control.costs import LatencyModel, Shape, shape_of
from outrider_runtime.control.explore import Explorer
from outrider_runtime.control.goodput import Goodput
from outrider_runtime.control.holes import HoleCost
from outrider_runtime.control.latency import OnlineLatency
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.tally import Tally
from outrider_runtime.control.truth import Truth

LONGEST_STEP_S = 120.0
LONGEST_OUTSIDE_S = 1.0
"""Of a step, outside the models' passes: the machine slept."""
MOST_UNSETTLED = 16
"""Steps that wait to be learned from, where nobody asks for a long time (a pin, mode Static)."""


class Evidence:
    """Acceptance, step times, goodput, and what probes and exploration measured."""

    def __init__(self, settings: Settings, latency: LatencyModel | None, rng: np.random.Generator) -> None:
        self._settings = settings
        names = [drafter.name for drafter in settings.drafters]
        self.acceptance = Acceptance(names, settings.max_draft_tokens)
        self.replace_latency(latency)
        self.goodput = Goodput()
        self.truth = Truth(rng)
        self.explorer = Explorer(rng)
        neural = settings.neural
        self.holes = None if neural is None or neural.needs_whole_kv else HoleCost(neural.name, rng)
        """None where a hole is known to make the neural draft's proposals junk."""
        self.tally = Tally(names, settings.max_draft_tokens)
        self.longest = 1
        """Most tokens that any request ever verified."""
        self._unsettled: list[StepOutcome] = []

    def replace_latency(self, latency: LatencyModel | None) -> None:
        """A profile was loaded or changed; online corrections start anew. None: learn every cost."""
        self.latency = OnlineLatency(latency, self._settings.drafters, self._settings.largest_graph_tokens)

    def observe(self, outcome: StepOutcome) -> None:
        """A step has finished."""
        self._unsettled.append(outcome)
        if len(self._unsettled) >= MOST_UNSETTLED:
            self.settle()

    def settle(self, now: float | None = None) -> None:
        """Learn from the steps that have finished since. Call before a new choice: three steps together cost hardly
        more than one, and in a small model's step that is time that users notice. now: None for the last step's."""
        outcomes, self._unsettled = self._unsettled, []
        for outcome in outcomes:
            self._learn(outcome)
        trials = [request for outcome in outcomes for request in outcome.requests]
        self._count(trials, self.tally.last_step_at if now is None else now)

    def _learn(self, outcome: StepOutcome) -> None:
        """Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        self.tally.observe(outcome)
        if not self._observe_times(outcome):
            self.tally.dropped_steps += 1
            return
        self.tally.busy_s += outcome.step_s
        plain_rate = self.latency.plain_rate(_decoding_shape(outcome))
        if outcome.prefill_tokens == 0:
            self.goodput.observe(outcome.tokens, outcome.step_s, plain_rate)
        self.explorer.observe(outcome, max(plain_rate, self.goodput.rate(plain_rate)))
        self.truth.observe(outcome)
        self.longest = max(self.longest, max((request.verified for request in outcome.requests), default=0))

    def _count(self, trials: Sequence[RequestOutcome], now: float) -> None:
        alarms = self.acceptance.alarms
        self.acceptance.observe(trials, now)
        if self.holes is not None:
            self.holes.observe(trials)
        if self.acceptance.alarms > alarms:
            self.truth.lift()

    def forget(self, request_id: str) -> None:
        """The request has ended; its last trials count first."""
        self.settle()
        self.acceptance.forget(request_id)
        if self.holes is not None:
            self.holes.forget(request_id)

    def _observe_times(self, outcome: StepOutcome) -> bool:
        """False when one of the step's times is absurd."""
        drafts_s = sum(outcome.draft_s.values()) + self._catch_up_s(outcome.catch_up)
        target_s = outcome.step_s - drafts_s if math.isnan(outcome.target_s) else outcome.target_s
        shape = shape_of(outcome)
        if not math.isfinite(outcome.step_s) or not 0 < outcome.step_s < LONGEST_STEP_S:
            return False
        if not math.isnan(outcome.target_s) and outcome.step_s - target_s - drafts_s > LONGEST_OUTSIDE_S:
            return False
        plausible = self.latency.observe_target(shape, outcome.mode, target_s)
        if plausible and not math.isnan(outcome.target_s):  # else drafts are not known
            self._observe_step(outcome, shape, outcome.step_s - drafts_s)
        for name, seconds in outcome.draft_s.items():
            passes = self._passes(outcome.draft_plan, name)
            plausible &= self.latency.observe_draft(name, shape, passes, seconds)
        neural, caught = self._settings.neural, outcome.catch_up
        if neural is not None and caught is not None and not math.isnan(caught.seconds):
            plausible &= self.latency.observe_catch_up(neural.name, _catch_up_shape(caught), caught.seconds)
        return plausible

    def _observe_step(self, outcome: StepOutcome, shape: Shape, seconds: float) -> None:
        """`seconds` without the drafts."""
        if outcome.prefill_tokens == 0:
            verifies = any(outcome.verify_plan.lengths)
            self.latency.observe_decoding(shape, outcome.mode, seconds, verifies=verifies)
        elif outcome.n_decoding:
            decoding = _decoding_shape(outcome)
            verified = outcome.n_batched - outcome.prefill_tokens - outcome.n_decoding
            self.latency.observe_prompts(decoding, verified, outcome.prefill_tokens, seconds)

    def _catch_up_s(self, caught: CatchUpOutcome | None) -> float:
        """As measured, else as predicted."""
        neural = self._settings.neural
        if caught is None or neural is None:
            return 0.0
        if math.isnan(caught.seconds):
            return self.latency.catch_up_s(neural.name, _catch_up_shape(caught))
        return caught.seconds

    def _passes(self, plan: DraftPlan, name: str) -> int:
        neural = self._settings.neural
        return max(1, plan.neural_tokens if neural is not None and neural.name == name else plan.draft_tokens)


def _decoding_shape(outcome: StepOutcome) -> Shape:
    """Of its decoding requests, a token each."""
    requests = max(1, outcome.n_decoding)
    return Shape(outcome.n_context, requests, requests, outcome.n_context / 1000)


def _catch_up_shape(caught: CatchUpOutcome) -> Shape:
    return Shape(caught.n_context, caught.tokens, caught.n_requests, caught.n_context_query)
