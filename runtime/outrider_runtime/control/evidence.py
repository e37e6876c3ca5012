"""The observing half of the core: everything that finished steps have taught. The planning half reads it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.acceptance import Acceptance, Counts, Verdicts, observe_trials
from outrider_runtime.control.batch import Columns, Floats, Ints
from outrider_runtime.control.compiled import borrowed, compiled
from outrider_runtime.control.observed_times import (
    ROWS,
    Belief,
    Beliefs,
    Drafting,
    PlainStep,
    StepTimes,
    TargetRun,
    observe_times,
)
from outrider_runtime.control.plans import Nodes, Outcome, Purpose
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.state import StepCounts, count, new_tally
from outrider_runtime.control.step_times import Costs, LatencyModel, this_step
from outrider_runtime.control.trials import Neighbour, TrialSchedule
from outrider_runtime.control.value import Goodput

TRIALS = (Purpose.PROBE, Purpose.EXPLORE)
CHOSEN = (Purpose.CHOICE, Purpose.SLO)
LONGEST_STEP_S = 120.0
LONGEST_OUTSIDE_S = 1.0
"""Most seconds of a step outside the models' passes; after more than that, the machine slept."""


class Evidence:
    """Acceptance rates, step times, goodput, and the results of trials."""

    def __init__(self, settings: Settings, model: LatencyModel | None, rng: np.random.Generator) -> None:
        self._settings = settings
        self.acceptance = Acceptance(settings)
        self.latency = StepTimes(model, settings)
        self.goodput = Goodput()
        self.trials = TrialSchedule(rng)
        self.tally = new_tally(len(settings.drafters), settings.max_draft_tokens)
        self.longest = 1
        """Largest verification length of any request so far."""
        self._counters = self.tally.of_drafter, self.tally.lengths, self.tally.users

    def replace_latency(self, model: LatencyModel | None) -> None:
        """Use a profile that was loaded or changed; its online corrections start again. None: learn every cost."""
        self.latency = StepTimes(model, self._settings)

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step. Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        self.acceptance.age(outcome.output_at_s)
        ran, drafts_s, plain = self._learn(outcome)
        self.tally.observe(outcome, ran, plain.prompts_s)
        self.longest = max(self.longest, ran.longest)
        if math.isnan(plain.decode_s):
            self.tally.dropped_steps += 1
            return
        self.trials.earn()
        if plain.decode_s <= 0:
            return
        prompts = ran.shape.n_prompt
        tokens, requests = outcome.tokens - ran.begun, ran.shape.n_batched - prompts  # a prefill's own token
        plain_rate, decode_s = requests / plain.decode_s, outcome.step_s - plain.prompts_s
        self._observe_goodput(outcome, tokens, decode_s, plain_rate, prefill=prompts > 0)
        work_s = tokens / requests * plain.decode_s + plain.prompts_s
        self._observe_speedup(outcome, work_s, plain.decode_s + plain.prompts_s, drafts_s)

    def _learn(self, outcome: Outcome) -> Taught:
        latency, batch, forest, plan = self.latency, outcome.batch, outcome.forest, outcome.draft_plan
        times = outcome.step_s, outcome.target_s
        if latency.learning:
            target_s, drafts_s = _seconds(times, outcome.draft_s)
            if _believable(outcome.step_s, target_s, drafts_s):
                shape = this_step(Columns(*batch.columns))
                latency.learn(TargetRun(ROWS[outcome.mode], shape, outcome.scored_tokens, target_s))
        return _observe(
            (
                batch.columns, forest.columns, np.ascontiguousarray(forest.drafter_order), forest.lengths,
                (outcome.verified, outcome.accepted, outcome.tried), ROWS[outcome.mode], times, outcome.scored_tokens,
                (plan.feed, plan.drafter_order, plan.passes, plan.widths, batch.context, outcome.draft_s),
            ),
            (self.acceptance.columns, self._counters, latency.columns, latency.memory),
        )  # fmt: skip

    def _observe_goodput(
        self, outcome: Outcome, tokens: int, seconds: float, plain_rate: float, *, prefill: bool
    ) -> None:
        """Learn lambda, and charge a trial's cost. tokens, seconds: those of the step's decoding, without prefill.
        plain_rate: modelled goodput of plain decoding at its batch, tokens/s."""
        if seconds <= 0.0:
            return
        purposes = outcome.verify_purpose, outcome.draft_plan.purpose
        if purposes[0] in TRIALS or purposes[1] in TRIALS:
            self.trials.pay(seconds, tokens / (plain_rate * max(1.0, self.goodput.ratio)))
        if Purpose.EXPLORE not in purposes:  # lambda is the goodput of the loop's own choices
            self.goodput.observe(tokens, seconds, plain_rate, prefill=prefill)

    def _observe_speedup(self, outcome: Outcome, work_s: float, plain_s: float, drafts_s: float) -> None:
        """Compare probes with other steps. work_s: modelled seconds of plain decoding for the step's tokens and
        prompts. plain_s: modelled seconds of one plain step."""
        verify, draft = outcome.verify_purpose, outcome.draft_plan.purpose
        if verify is Purpose.PROBE:
            if draft is Purpose.PROBE:  # else drafters ran again at its end
                # Feeding drafters that are always fed is no part of plain decoding.
                self.trials.speedup.observe_plain(work_s, outcome.step_s - drafts_s, outcome.tokens)
            return
        speculates = verify in CHOSEN and draft in CHOSEN and outcome.drafted and bool(outcome.draft_plan.passes.any())
        step = Neighbour(work_s, outcome.step_s, plain_s, for_slo=Purpose.SLO in (verify, draft))
        self.trials.observe(step, speculates=speculates)


@compiled
def _seconds(times: tuple[float, float], draft_s: Floats) -> tuple[float, float]:
    """Seconds of the target's pass, and of the drafts. times: seconds of the step and of the target's pass; NaN: not
    measured."""
    drafts_s = 0.0
    for seconds in draft_s:
        drafts_s += seconds if seconds > 0.0 else 0.0  # NaN: it did not run
    target_s = times[0] - drafts_s if np.isnan(times[1]) else times[1]
    return target_s, drafts_s


@compiled
def _believable(step_s: float, target_s: float, drafts_s: float) -> bool:
    """Whether the times of a step are plausible."""
    return 0.0 < step_s < LONGEST_STEP_S and not step_s - drafts_s - target_s > LONGEST_OUTSIDE_S


class StepColumns(NamedTuple):
    """Fields of an `Outcome` for compiled code, as plain tuples: compiled calls unpack them faster than named ones."""

    batch: tuple[Any, ...]
    """Fields of `Columns`."""
    nodes: tuple[Any, ...]
    """Fields of `Nodes`."""
    drafter_order: Ints
    """(R, N): see `Forest`."""
    lengths: Ints
    """(D,): see `Forest`."""
    verdicts: tuple[Any, ...]
    """Fields of `Verdicts`."""
    row: int
    """See `TargetRun`."""
    times: tuple[float, float]
    """See `_seconds`."""
    scored_tokens: int
    drafting: tuple[Any, ...]
    """Fields of `Drafting`."""


class Memory(NamedTuple):
    """Everything that observing a step changes in place, as plain tuples."""

    counts: tuple[Any, ...]
    """Fields of `Counts`."""
    counters: tuple[Ints, Ints, Floats]
    """See `state.count`."""
    costs: tuple[Any, ...]
    """Fields of `Costs`."""
    beliefs: tuple[Any, ...]
    """Fields of `Beliefs`."""


class Taught(NamedTuple):
    """Numbers of a finished step that the rest of the observing half needs."""

    ran: StepCounts
    drafts_s: float
    plain: PlainStep


@compiled
def _observe(finished: tuple[Any, ...], memory: tuple[Any, ...]) -> Taught:
    """Learn from a step. finished: fields of `StepColumns`. memory: those of `Memory`."""
    step, known = borrowed(StepColumns(*finished)), borrowed(Memory(*memory))
    batch, nodes, verdicts = Columns(*step.batch), Nodes(*step.nodes), Verdicts(*step.verdicts)
    plan, plain = Drafting(*step.drafting), PlainStep(np.nan, 0.0)
    ran = count(batch, nodes, verdicts, *known.counters)
    if step.lengths.any():
        observe_trials(Counts(*known.counts), batch, nodes, step.drafter_order, step.lengths, verdicts)
    target_s, drafts_s = _seconds(step.times, plan.seconds)
    if _believable(step.times[0], target_s, drafts_s):
        target, drafts, absurd = known.beliefs
        run = TargetRun(step.row, ran.shape, step.scored_tokens, target_s)
        plain = observe_times(Costs(*known.costs), Beliefs(Belief(*target), Belief(*drafts), absurd), run, plan)
    return Taught(ran, drafts_s, plain)
