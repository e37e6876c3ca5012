"""The observing half: everything that finished steps have taught, which the planning half reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider_runtime.control.acceptance.estimate import Acceptance
from outrider_runtime.control.acceptance.trials import Counts, Verdicts
from outrider_runtime.control.acceptance.trials import observe as observe_trials
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.correction import Believed
from outrider_runtime.control.cost.fresh_prompts import FreshPrompts
from outrider_runtime.control.cost.latency import ROWS, Drafting, Latency, Memory, observe_times, verifying
from outrider_runtime.control.cost.model import LatencyModel, Shape, this_step
from outrider_runtime.control.cost.step_times import Costs
from outrider_runtime.control.data.batch import Columns, Floats, Ints
from outrider_runtime.control.data.forest import Nodes
from outrider_runtime.control.data.plans import Outcome, Purpose
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.state import Ran, count, new_tally
from outrider_runtime.control.truth.explore import Explorer
from outrider_runtime.control.truth.probes import Neighbour, Probes
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
        self.goodput, self.fresh_prompts = Goodput(), FreshPrompts()
        self.probes = Probes(rng)
        self.explorer = Explorer(rng)
        self.tally = new_tally(len(settings.drafters), settings.max_draft_tokens)
        self.longest = 1
        """Most tokens that any request ever verified."""
        self._counters = self.tally.of_drafter, self.tally.lengths

    def replace_latency(self, model: LatencyModel | None) -> None:
        """A profile was loaded or changed; online corrections start anew. None: learn every cost."""
        self.latency = Latency(model, self._settings)

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step. Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        self.acceptance.age(outcome.now)
        ran, drafts_s, plain_s, prompts_s = self._learn(outcome)
        self.tally.observe(outcome, ran)
        self.longest = max(self.longest, ran.longest)
        self.fresh_prompts.observe(ran.shape.n_prompt > 0, read_on=bool(outcome.batch.prompt_left.any()))
        if math.isnan(plain_s):
            self.tally.dropped_steps += 1
            return
        self.explorer.earn()
        if plain_s <= 0:
            return
        _, batched, _, _, prompts = ran.shape
        decoded, decoding = outcome.tokens - ran.begun, batched - prompts  # a prompt brings one token itself
        self._observe_goodput(outcome, decoded, outcome.step_s - prompts_s, decoding / plain_s, prefill=prompts > 0)
        work_s = decoded / decoding * plain_s + prompts_s
        self._observe_truth(outcome, work_s, plain_s + prompts_s, drafts_s)

    def _learn(self, outcome: Outcome) -> tuple[Ran, float, float, float]:
        """See `_observe`."""
        latency, forest, plan, row = self.latency, outcome.forest, outcome.draft_plan, ROWS[outcome.mode]
        columns, asked = outcome.batch.columns, np.ascontiguousarray(forest.asked)
        verdicts, times = (outcome.verified, outcome.accepted, outcome.tried), (outcome.step_s, outcome.target_s)
        if latency.learning:
            target_s, drafts_s = _seconds(times, outcome.draft_s)
            if _believable(outcome.step_s, target_s, drafts_s):
                latency.learn(_shape(columns, outcome.scored_tokens), row, target_s)
        return _observe(
            columns, forest.columns, asked, forest.lengths, verdicts, self.acceptance.columns, self._counters,
            latency.columns, latency.memory, row, times, outcome.draft_s,
            (plan.feed, plan.asked, plan.passes, plan.widths, outcome.batch.context), outcome.scored_tokens,
        )  # fmt: skip

    def _observe_goodput(
        self, outcome: Outcome, tokens: int, seconds: float, plain_rate: float, *, prefill: bool
    ) -> None:
        """tokens, seconds: of the step's decoding, without its prompts. plain_rate: modelled tokens per second of plain
        decoding at its batch."""
        if seconds <= 0.0:
            return
        if outcome.verify_purpose is Purpose.EXPLORE or outcome.draft_plan.purpose is Purpose.EXPLORE:
            self.explorer.pay(seconds, tokens / (plain_rate * max(1.0, self.goodput.ratio)))
        else:  # lambda is what a second brings as the loop serves otherwise
            self.goodput.observe(tokens, seconds, plain_rate, prefill=prefill)

    def _observe_truth(self, outcome: Outcome, work_s: float, plain_s: float, drafts_s: float) -> None:
        """work_s: seconds that plain decoding takes, by the model, for what the step gave; plain_s: for one step."""
        verify, draft = outcome.verify_purpose, outcome.draft_plan.purpose
        if verify is Purpose.PROBE:
            if draft is Purpose.PROBE:  # a draft whose cache is always fed is no plain decoding
                self.probes.observe_probe(work_s, outcome.step_s - drafts_s, outcome.tokens)
            return
        chosen = {verify, draft} <= {Purpose.CHOICE, Purpose.SLO}
        speculates = chosen and outcome.drafted and bool(outcome.draft_plan.passes.any())
        step = Neighbour(work_s, outcome.step_s, plain_s, for_slo=Purpose.SLO in (verify, draft))
        self.probes.observe(step, speculates=speculates)


@compiled
def _seconds(times: tuple[float, float], draft_s: Floats) -> tuple[float, float]:
    """Of the target's pass, and of the drafts. times: of the step, and of the target's pass, NaN where nobody measured
    it."""
    drafts_s = 0.0
    for seconds in draft_s:
        drafts_s += seconds if seconds > 0.0 else 0.0  # NaN: it did not run
    target_s = times[0] - drafts_s if np.isnan(times[1]) else times[1]
    return target_s, drafts_s


@compiled
def _believable(step_s: float, target_s: float, drafts_s: float) -> bool:
    """The step was no absurd one."""
    return 0.0 < step_s < LONGEST_STEP_S and not step_s - drafts_s - target_s > LONGEST_OUTSIDE_S


@compiled
def _shape(columns: tuple[Any, ...], scored_tokens: int) -> Shape:
    """Shape of the target's pass, with the places that it scores."""
    return verifying(this_step(Columns(*columns)), scored_tokens)


@compiled
def _observe(
    columns: tuple[Any, ...], forest: tuple[Any, ...], asked: Ints, lengths: Ints, verdicts: tuple[Any, ...],
    counts: tuple[Any, ...], counters: tuple[Ints, Ints], costs: tuple[Any, ...], memory: tuple[Any, ...], row: int,
    times: tuple[float, float], draft_s: Floats, drafting: tuple[Any, ...], scored_tokens: int,
) -> tuple[Ran, float, float, float]:  # fmt: skip
    """What a step was; seconds of its drafts; and see `observe_times`.

    As `Columns`, `Nodes`, `Verdicts`, `Counts`, `Costs`, `Memory`, `Drafting`. asked, lengths: see `Forest`. counters:
    see `state.count`. times: see `_seconds`. scored_tokens: as in `Outcome`.
    """
    batch, nodes, found, plain = Columns(*columns), Nodes(*forest), Verdicts(*verdicts), (np.nan, 0.0)
    ran = count(batch, nodes, found, counters[0], counters[1])
    if lengths.any():
        observe_trials(Counts(*counts), batch, nodes, asked, lengths, found)
    target_s, drafts_s = _seconds(times, draft_s)
    if _believable(times[0], target_s, drafts_s):
        learned = Memory(Believed(*memory[0]), Believed(*memory[1]), memory[2])
        plan = Drafting(*drafting)
        plain = observe_times(Costs(*costs), learned, row, ran.shape, target_s, scored_tokens, plan, draft_s)
    return ran, drafts_s, plain[0], plain[1]
