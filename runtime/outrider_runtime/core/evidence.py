"""The observing half: everything that finished steps have taught, which the planning half reads."""

from __future__ import annotations

import math

import numpy as np

from outrider_runtime.core.acceptance import Acceptance
from outrider_runtime.core.batch import NOBODY, Ints
from outrider_runtime.core.cost import LatencyModel, Shape, this_step, without_prompts
from outrider_runtime.core.explore import Explorer
from outrider_runtime.core.forest import ROOT
from outrider_runtime.core.goodput import Goodput
from outrider_runtime.core.latency import Latency
from outrider_runtime.core.plans import Outcome, Purpose
from outrider_runtime.core.probes import Probes
from outrider_runtime.core.settings import Settings
from outrider_runtime.core.state import counts_by_drafter, new_tally

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
        base = this_step(outcome.batch)
        decoding = round(base.n_batched - base.n_prompt)
        verified = self._observe_trials(outcome, decoding)
        if not self._observe_times(outcome, base, decoding, verified):
            self.tally.dropped_steps += 1
            return
        alone = without_prompts(base, decoding) if base.n_prompt else base
        plain_rate = self.latency.plain_rate(alone) if decoding else 0.0
        if decoding and not base.n_prompt:
            self.goodput.observe(outcome.tokens, outcome.step_s, plain_rate)
        self.explorer.earn()
        purposes = (outcome.verify_purpose, outcome.draft_plan.purpose)
        if Purpose.EXPLORE in purposes and not base.n_prompt and plain_rate > 0:
            self.explorer.pay(outcome.step_s, outcome.tokens / max(plain_rate, self.goodput.rate(plain_rate)))
        if decoding:
            self._observe_truth(outcome, base, decoding, verified)

    def _observe_trials(self, outcome: Outcome, decoding: int) -> int:
        """Returns how many nodes were verified."""
        batch, forest = outcome.batch, outcome.forest
        counts: Ints = np.zeros(len(batch), np.int64)
        tried = np.zeros((len(self._settings.drafters), 4), np.int64)
        if len(forest):
            counts = np.bincount(forest.request[outcome.verified], minlength=len(batch))
            above = (forest.parent == ROOT) | outcome.accepted[forest.parent]
            tried = counts_by_drafter(
                forest, outcome.verified & above, outcome.verified, outcome.accepted, len(tried)
            )  # fmt: skip
            self.longest = max(self.longest, int(counts.max()))
        self.acceptance.age(outcome.now)
        if len(forest) or (forest.asked[0] != NOBODY).any():
            alarms = self.acceptance.alarms
            self.acceptance.observe(batch, forest, outcome.verified, outcome.accepted)
            if self.acceptance.alarms > alarms:
                self.probes.lift()
        self.tally.observe(outcome, tried, counts, decoding)
        return int(counts.sum())

    def _observe_times(self, outcome: Outcome, base: Shape, decoding: int, verified: int) -> bool:
        """False when one of the step's times is absurd."""
        step_s, drafts_s = outcome.step_s, float(np.nansum(outcome.draft_s))
        measured = not math.isnan(outcome.target_s)
        target_s = outcome.target_s if measured else step_s - drafts_s
        if not math.isfinite(step_s) or not 0 < step_s < LONGEST_STEP_S:
            return False
        if measured and step_s - target_s - drafts_s > LONGEST_OUTSIDE_S:
            return False
        query = base.n_context_query + verified * base.n_context / max(1.0, base.n_requests) / 1000
        shape = Shape(base.n_context, base.n_batched + verified, base.n_requests, query, base.n_prompt)
        plausible = self.latency.observe_target(shape, outcome.mode, target_s)
        if plausible and measured and not base.n_prompt:
            self.latency.observe_decoding(shape, outcome.mode, step_s - drafts_s, verified)
        elif plausible and measured and decoding:
            alone = without_prompts(base, decoding)
            self.latency.observe_prompts(alone, verified, round(base.n_prompt), step_s - drafts_s)
        for drafter in np.flatnonzero(outcome.draft_s > 0).tolist():
            first, passes = self._draft_shape(outcome, drafter)
            plausible &= self.latency.observe_draft(drafter, first, passes, float(outcome.draft_s[drafter]))
        return plausible

    def _draft_shape(self, outcome: Outcome, drafter: int) -> tuple[Shape, int]:
        """What the first pass of a drafter ran over, and how many passes there were."""
        plan, batch = outcome.draft_plan, outcome.batch
        fed = plan.feed[drafter]
        rows = fed > 0 if fed.any() else (plan.asked == drafter).any(axis=0)
        context = float(batch.context[rows].sum())
        requests = max(1, int(rows.sum()))
        tokens = max(requests, int(fed.sum()))
        return Shape(context, tokens, requests, context / 1000), max(1, int(plan.passes[drafter]))

    def _observe_truth(self, outcome: Outcome, base: Shape, decoding: int, verified: int) -> None:
        plain_s, seconds = self.latency.decode_s(base, 0), outcome.step_s
        if plain_s <= 0:
            return
        tokens = decoding + int(outcome.accepted.sum())  # a prompt's first token is none of decoding's
        verify, draft = outcome.verify_purpose, outcome.draft_plan.purpose
        if verify is Purpose.PROBE:
            if draft is Purpose.PROBE:
                seconds -= float(np.nansum(outcome.draft_s))  # a draft whose cache is always fed is no plain decoding
                self.probes.observe_probe(tokens, decoding * seconds / plain_s)
            return
        speculates = verify is draft is Purpose.CHOICE and verified > 0 and bool(outcome.draft_plan.passes.any())
        self.probes.observe(tokens, decoding * seconds / plain_s, speculates=speculates)
