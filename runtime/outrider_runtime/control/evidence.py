"""The observing half: everything that finished steps have taught, which the planning half reads."""

from __future__ import annotations

import math

import numpy as np

from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import Ints
from outrider_runtime.control.cost import LatencyModel, Shape, this_step, without_prompts
from outrider_runtime.control.explore import Explorer
from outrider_runtime.control.latency import Latency
from outrider_runtime.control.plans import Outcome, Purpose
from outrider_runtime.control.probes import Probes
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.state import new_tally
from outrider_runtime.control.value import Goodput, Price

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

    def price(self, shape: Shape, context: Ints, read_s: float, most: int) -> Price:
        """See `Latency.price`; lambda is measured."""
        return self.latency.price(shape, context, read_s, self.goodput.ratio, most)

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step. Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        base = this_step(outcome.batch)
        verified = self._observe_trials(outcome)
        drafts_s = [seconds if seconds > 0 else 0.0 for seconds in outcome.draft_s.tolist()]  # NaN: did not run
        if not self._observe_times(outcome, base, verified, drafts_s):
            self.tally.dropped_steps += 1
            return
        self.explorer.earn()
        alone = without_prompts(base)
        plain_s = self.latency.decode_s(alone, 0) if alone.n_requests else 0.0
        if plain_s > 0:
            self._observe_worth(outcome, base, alone, plain_s, verified, sum(drafts_s))

    def _observe_trials(self, outcome: Outcome) -> int:
        """Returns how many nodes were verified."""
        verified, longest = self.tally.observe(outcome)
        self.longest = max(self.longest, longest)
        self.acceptance.age(outcome.now)
        if any(outcome.forest.lengths.tolist()):
            alarms = self.acceptance.alarms
            self.acceptance.observe(outcome.batch, outcome.forest, outcome.tried, outcome.accepted)
            if self.acceptance.siblings is not None:
                self.acceptance.siblings.observe(outcome.forest, outcome.verified, outcome.accepted, len(outcome.batch))
            if self.acceptance.alarms > alarms:
                self.probes.lift()
        return verified

    def _observe_times(self, outcome: Outcome, base: Shape, verified: int, drafts_s: list[float]) -> bool:
        """False when one of the step's times is absurd."""
        step_s = outcome.step_s
        outside_s = step_s - sum(drafts_s)
        measured = not math.isnan(outcome.target_s)
        target_s = outcome.target_s if measured else outside_s
        if not math.isfinite(step_s) or not 0 < step_s < LONGEST_STEP_S:
            return False
        if measured and outside_s - target_s > LONGEST_OUTSIDE_S:
            return False
        query = base.n_context_query + verified * base.n_context / max(1.0, base.n_requests) / 1000
        shape = Shape(base.n_context, base.n_batched + verified, base.n_requests, query, base.n_prompt)
        plausible = self.latency.observe_target(shape, outcome.mode, target_s)
        if plausible and measured and not base.n_prompt:
            self.latency.observe_decoding(shape, outcome.mode, outside_s, verified)
        return self.latency.observe_drafts(outcome.draft_plan, outcome.batch.context, outcome.draft_s) and plausible

    def _observe_worth(
        self, outcome: Outcome, base: Shape, alone: Shape, plain_s: float, verified: int, drafts_s: float
    ) -> None:
        """plain_s: what plain decoding takes, as the model says, for the requests that decode, `alone`."""
        begun, prompts_s = 0, 0.0
        if base.n_prompt:
            begun = int(((outcome.batch.prompt > 0) & (outcome.batch.prompt_left == 0)).sum())
            prompts_s = self.latency.decode_s(base, 0) - plain_s
        else:
            self._observe_goodput(outcome, base.n_requests / plain_s)
        work_s = (outcome.tokens - begun) / alone.n_requests * plain_s + prompts_s  # a prompt brings one token itself
        self._observe_truth(outcome, work_s, verified, drafts_s)

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
