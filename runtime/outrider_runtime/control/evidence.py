"""The observing half: everything that finished steps have taught, which the planning half reads."""

from __future__ import annotations

import math

import numpy as np

from outrider_runtime.control.acceptance.estimate import Acceptance
from outrider_runtime.control.cost.latency import Latency
from outrider_runtime.control.cost.model import LatencyModel
from outrider_runtime.control.data.plans import Outcome, Purpose
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.state import Ran, new_tally
from outrider_runtime.control.truth.explore import Explorer
from outrider_runtime.control.truth.probes import Probes
from outrider_runtime.control.value import Goodput

LONGEST_STEP_S = 120.0
LONGEST_OUTSIDE_S = 1.0
"""Of a step, outside the models' passes: the machine slept."""


class Evidence:
    """Acceptance, step times, goodput, and what probes and exploration measured."""

    def __init__(self, settings: Settings, model: LatencyModel | None, rng: np.random.Generator) -> None:
        self._settings = settings
        self.acceptance = Acceptance(settings)
        self.latency = Latency(model, settings)
        self.goodput = Goodput()
        self.probes = Probes(rng)
        self.explorer = Explorer(rng)
        self.tally = new_tally(len(settings.drafters), settings.max_draft_tokens)
        self.longest = 1
        """Most tokens that any request ever verified."""

    def replace_latency(self, model: LatencyModel | None) -> None:
        """A profile was loaded or changed; online corrections start anew. None: learn every cost."""
        self.latency = Latency(model, self._settings)

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step. Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        ran = self._observe_trials(outcome)
        drafts_s = sum(seconds for seconds in outcome.draft_s.tolist() if seconds > 0)  # NaN: did not run
        plain_s, prompts_s = self._observe_times(outcome, ran, drafts_s)
        if math.isnan(plain_s):
            self.tally.dropped_steps += 1
            return
        self.explorer.earn()
        if plain_s <= 0:
            return
        _, batched, requests, _, prompts = ran.shape
        if not prompts:
            self._observe_goodput(outcome, requests / plain_s)
        # A prompt brings one token itself.
        work_s = (outcome.tokens - ran.begun) / (batched - prompts) * plain_s + prompts_s
        self._observe_truth(outcome, work_s, ran.verified, drafts_s)

    def _observe_trials(self, outcome: Outcome) -> Ran:
        ran = self.tally.observe(outcome)
        self.longest = max(self.longest, ran.longest)
        self.acceptance.age(outcome.now)
        if any(outcome.forest.lengths.tolist()):
            alarms = self.acceptance.alarms
            self.acceptance.observe(outcome.batch, outcome.forest, outcome.tried, outcome.accepted)
            if self.acceptance.siblings is not None:
                self.acceptance.siblings.observe(outcome.forest, outcome.verified, outcome.accepted, len(outcome.batch))
            if self.acceptance.alarms > alarms:
                self.probes.lift()
        return ran

    def _observe_times(self, outcome: Outcome, ran: Ran, drafts_s: float) -> tuple[float, float]:
        """See `Latency.observe`; NaN when one of the step's times is absurd."""
        step_s, target_s, outside_s = outcome.step_s, outcome.target_s, outcome.step_s - drafts_s
        if not math.isfinite(step_s) or not 0 < step_s < LONGEST_STEP_S:
            return math.nan, 0.0
        if math.isnan(target_s):
            target_s, outside_s = outside_s, math.nan
        elif outside_s - target_s > LONGEST_OUTSIDE_S:
            return math.nan, 0.0
        return self.latency.observe(
            ran.shape, outcome.mode, target_s, outside_s, ran.verified, outcome.draft_plan, outcome.batch.context,
            outcome.draft_s,
        )  # fmt: skip

    def _observe_goodput(self, outcome: Outcome, plain_rate: float) -> None:
        """A step without prompts; plain_rate: modelled tokens per second of plain decoding at its batch."""
        self.goodput.observe(outcome.tokens, outcome.step_s, plain_rate)
        if outcome.verify_purpose is Purpose.EXPLORE or outcome.draft_plan.purpose is Purpose.EXPLORE:
            self.explorer.pay(outcome.step_s, outcome.tokens / (plain_rate * max(1.0, self.goodput.ratio)))

    def _observe_truth(self, outcome: Outcome, work_s: float, verified: int, drafts_s: float) -> None:
        """work_s: what the model says plain decoding takes for what the step gave."""
        verify, draft = outcome.verify_purpose, outcome.draft_plan.purpose
        if verify is Purpose.PROBE:
            if draft is Purpose.PROBE:  # a draft whose cache is always fed is no plain decoding
                self.probes.observe_probe(work_s, outcome.step_s - drafts_s, outcome.tokens)
            return
        speculates = verify is draft is Purpose.CHOICE and verified > 0 and any(outcome.draft_plan.passes.tolist())
        self.probes.observe(work_s, outcome.step_s, speculates=speculates)
