"""One engine step, from its plans to the outcome that the controller observes. Shapes: D drafters, N requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import Batch, Bools, Floats, Ints
from outrider_runtime.control.pending_proposals import PendingProposals
from outrider_runtime.control.plans import (
    DraftPlan,
    ExecutionMode,
    Forest,
    Outcome,
    Purpose,
    chain_verdicts,
    step_tokens,
)
from outrider_runtime.control.step_times import Shape
from outrider_runtime.loop.coverage import ScheduledStep
from outrider_runtime.loop.draft_caches import KVGap


class DraftingResult(Protocol):
    """An engine's report on the drafting at the end of a step, with requests in the step's order."""

    step: int
    seconds: NDArray[np.float64]
    """(D,): seconds of each drafter on the device; NaN if it did not run to its end."""
    catch_up_s: dict[int, float]
    """Seconds of filling KV gaps, by drafter, not included in `seconds`; absent: no gap was filled."""
    failures: dict[int, str]
    """Reason of the failure in a sentence, by drafter."""

    @property
    def proposed(self) -> NDArray[np.int8] | None:
        """(N,): tokens proposed for each request; None if the engine supplies its trees."""

    @property
    def proposer(self) -> NDArray[np.int8] | None:
        """(N,): the drafter that proposed them; `NO_DRAFTER` without a proposal."""

    @property
    def confidence(self) -> NDArray[np.int8] | None:
        """(N, K): the drafter's confidence in each token, see `confidences`; None if the engine reports none."""


class NodeVerdicts(NamedTuple):
    """Results of a step's nodes; (M,) each, see the fields of the same names in `Outcome`."""

    verified: Bools
    accepted: Bools
    tried: Bools


class ChainCounts(NamedTuple):
    """Results of chains, as token counts. All columns (N,), in the step's order."""

    sampled: Ints
    """Tokens that each request got, bonus token included."""
    scored: Ints
    """Placeholders of each request that the target scored; empty: none of any request."""
    trimmed: Ints | None = None
    """Scheduled placeholders that the device left out of the step; None: none of any request."""

    def of(self, forest: Forest) -> NodeVerdicts:
        """Convert to verdicts of nodes."""
        if not len(self.scored):
            nothing = np.zeros(len(forest), bool)
            return NodeVerdicts(nothing, nothing, nothing)
        return NodeVerdicts(*chain_verdicts(forest.request, forest.depth, self.scored, self.sampled))


NOTHING_SCORED = ChainCounts(np.zeros(0, np.int64), np.zeros(0, np.int64))
"""Counts of a step without placeholders."""


class TargetResult(NamedTuple):
    """Times and output of the target's pass."""

    output_at: float
    step_s: float
    target_s: float
    tokens: int
    verdicts: NodeVerdicts | ChainCounts


@dataclass(slots=True, eq=False)
class Record:
    """A scheduled step that the controller has not observed yet."""

    number: int
    scheduled_at: float
    step: ScheduledStep
    batch: Batch
    proposals: PendingProposals
    """(N,): proposals that waited for the step."""
    verify_purpose: Purpose
    plan: DraftPlan
    """Plan for the end of the step, as it is carried out."""
    runs: Bools
    gaps: tuple[KVGap, ...]
    largest_graph_tokens: int | None
    placeholders: Ints
    """(N,): tokens of each request in the scheduled step that are proposals, or placeholders for them."""
    result: TargetResult | None = None
    draft_report: DraftingResult | None = None

    def outcome(self) -> Outcome:
        """Return the outcome of a finished step.

        Its time is NaN if drafters ran and did not report: the step's time contains theirs.
        """
        assert self.result is not None
        output_at, step_s, target_s, tokens, verdicts = self.result
        step = self.executed()
        plan, placeholders = self.plan, self.placeholders
        if step is not self.step:
            trimmed = self.step.tokens - step.tokens
            plan = replace(plan, feed=np.maximum(0, plan.feed - trimmed))
            placeholders = placeholders - trimmed
        if self.draft_report is None and self.runs.any():
            step_s = target_s = math.nan
        forest = self.proposals.forest(len(self.runs))
        if isinstance(verdicts, ChainCounts):
            verdicts = verdicts.of(forest)
        return Outcome(
            output_at_s=output_at, step_s=step_s, target_s=target_s, draft_s=self._draft_s(), tokens=tokens,
            mode=execution_mode(step, self.largest_graph_tokens), batch=self.batch, draft_plan=plan,
            verify_purpose=self.verify_purpose, forest=forest,
            verified=verdicts.verified, accepted=verdicts.accepted, tried=verdicts.tried,
            places=placeholders,
        )  # fmt: skip

    def executed(self) -> ScheduledStep:
        """Return the step without the placeholders that the device left out; known when it is finished."""
        verdicts = None if self.result is None else self.result.verdicts
        if not isinstance(verdicts, ChainCounts) or verdicts.trimmed is None:
            return self.step
        return self.step._replace(tokens=self.step.tokens - verdicts.trimmed)

    def _draft_s(self) -> Floats:
        """(D,): seconds of each drafter, filling of KV gaps included."""
        if self.draft_report is None:
            return np.full(len(self.runs), math.nan)
        if not self.draft_report.catch_up_s:
            return self.draft_report.seconds
        caught_up_s = [self.draft_report.catch_up_s.get(drafter, 0.0) for drafter in range(len(self.runs))]
        return self.draft_report.seconds + caught_up_s


class FinishedStep(NamedTuple):
    """A finished step, as `ControlLoop.listeners` get it; the profiler measures with it."""

    outcome: Outcome
    step: ScheduledStep
    adapters: Ints | None = None
    """(N,): numbers of the requests' LoRA adapters, see `AdapterCounter`; None: no request has one."""

    @property
    def shape(self) -> Shape:
        """The tokens that the target's pass really processed, placeholders without a proposal included."""
        context, tokens = self.step.context, self.step.tokens
        query = float((context * tokens).sum()) / 1000
        return Shape(float(context.sum()), float(tokens.sum()), len(tokens), query, float(self.step.prompt.sum()))


def execution_mode(step: ScheduledStep, largest_graph_tokens: int | None) -> ExecutionMode:
    """Return the mode of a step, which selects the coefficients of its cost."""
    tokens, uniform = step_tokens(step.tokens, step.prompt)
    if largest_graph_tokens is not None and tokens > largest_graph_tokens:
        return ExecutionMode.BEYOND_GRAPH
    return ExecutionMode.UNIFORM if uniform else ExecutionMode.VARLEN
