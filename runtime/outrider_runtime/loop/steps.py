"""One engine step, from its plans to the outcome that the controller learns from. Shapes: D drafters, N requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.cost.model import Shape
from outrider_runtime.control.data.batch import Batch, Bools, Floats, Ints
from outrider_runtime.control.data.forest import Forest, trials
from outrider_runtime.control.data.plans import DraftPlan, ExecutionMode, Outcome, Purpose
from outrider_runtime.loop.coverage import ScheduledStep
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.loop.pending_proposals import PendingProposals


class DraftingResult(Protocol):
    """What an engine tells of the drafting at the end of a step, requests in the step's order."""

    step: int
    seconds: NDArray[np.float64]
    """(D,): the device's time; NaN where a drafter did not run to its end."""
    catch_up_s: dict[int, float]
    """Drafter -> what closing its holes took, which `seconds` does not hold; absent: none are closed."""
    failures: dict[int, str]
    """Drafter -> why it failed, in a sentence."""

    @property
    def proposed(self) -> NDArray[np.int8] | None:
        """(N,): real proposals of each request; None where the engine hands over its trees themselves."""

    @property
    def proposer(self) -> NDArray[np.int8] | None:
        """(N,): whose they are; NOBODY where there are none."""

    @property
    def confidence(self) -> NDArray[np.int8] | None:
        """(N, K): how sure the drafter is of each token, see `confidences`; None where the engine reports none."""


class NodeVerdicts(NamedTuple):
    """What became of a step's nodes; (M,) each, as `Outcome` has them."""

    verified: Bools
    accepted: Bools
    tried: Bools


class ChainCounts(NamedTuple):
    """What became of chains: as many of each request's tokens hold its nodes' verdicts."""

    sampled: Mapping[str, int]
    """Request -> tokens that it got, bonus token included."""
    scored: Mapping[str, int]
    """Request -> placeholders that the target scored."""
    trimmed: Mapping[str, int] | None = None
    """Request -> placeholders that were scheduled and that the device left out of the step; None: none."""

    def of(self, names: Sequence[str], forest: Forest) -> NodeVerdicts:
        """names: of the forest's requests."""
        if not self.scored:
            nothing = np.zeros(len(forest), bool)
            return NodeVerdicts(nothing, nothing, nothing)
        scored = np.array([self.scored.get(name, 0) for name in names], np.int64)
        kept = np.array([self.sampled.get(name, 1) - 1 for name in names], np.int64)
        verified = forest.depth <= scored[forest.request]
        accepted = forest.depth <= np.minimum(scored, kept)[forest.request]
        return NodeVerdicts(verified, accepted, trials(forest, verified, accepted))


class TargetResult(NamedTuple):
    """What came of the target's pass."""

    now: float
    step_s: float
    target_s: float
    tokens: int
    verdicts: NodeVerdicts | ChainCounts


@dataclass(slots=True, eq=False)
class Record:
    """A step that was scheduled and that the controller was not told of yet."""

    number: int
    scheduled_at: float
    step: ScheduledStep
    batch: Batch
    waited: PendingProposals
    """(N,): what was proposed for it."""
    verify_purpose: Purpose
    plan: DraftPlan
    """Of what is proposed at its end, as it is carried out."""
    runs: Bools
    holes: tuple[KVGap, ...]
    largest_graph_tokens: int | None
    places: Ints
    """(N,): tokens of each request in the scheduled step that are proposals, or placeholders for them."""
    finished: TargetResult | None = None
    drafted: DraftingResult | None = None

    def outcome(self) -> Outcome:
        """Of a step that is finished. Without a report on its drafters, whose time is in the step's, nothing is to be
        learned from its time."""
        assert self.finished is not None
        now, step_s, target_s, tokens, verdicts = self.finished
        step = self.ran()
        plan = replace(self.plan, feed=np.maximum(0, self.plan.feed - (self.step.tokens - step.tokens)))
        if self.drafted is None and self.runs.any():
            step_s = target_s = math.nan
        forest = self.waited.forest(len(self.runs))
        if isinstance(verdicts, ChainCounts):
            verdicts = verdicts.of(self.step.names, forest)
        return Outcome(
            now=now, step_s=step_s, target_s=target_s, draft_s=self._draft_s(), tokens=tokens,
            mode=execution_mode(step, self.largest_graph_tokens), batch=self.batch, draft_plan=plan,
            verify_purpose=self.verify_purpose, forest=forest,
            verified=verdicts.verified, accepted=verdicts.accepted, tried=verdicts.tried,
            places=self.places - (self.step.tokens - step.tokens),
        )  # fmt: skip

    def ran(self) -> ScheduledStep:
        """The step without the placeholders that the device left out; known when it is finished."""
        verdicts = None if self.finished is None else self.finished.verdicts
        if not isinstance(verdicts, ChainCounts) or not verdicts.trimmed:
            return self.step
        trimmed = np.array([verdicts.trimmed.get(name, 0) for name in self.step.names], np.int64)
        return self.step._replace(tokens=self.step.tokens - trimmed)

    def _draft_s(self) -> Floats:
        """(D,): each drafter's own time, with what closing its holes took."""
        if self.drafted is None:
            return np.full(len(self.runs), math.nan)
        caught_up_s = [self.drafted.catch_up_s.get(drafter, 0.0) for drafter in range(len(self.runs))]
        return self.drafted.seconds + caught_up_s


class FinishedStep(NamedTuple):
    """A finished step as listeners get it (the profiler measures through this)."""

    outcome: Outcome
    step: ScheduledStep

    @property
    def shape(self) -> Shape:
        """What the target's pass really processed, places without a proposal included."""
        context, tokens = self.step.context, self.step.tokens
        query = float((context * tokens).sum()) / 1000
        return Shape(float(context.sum()), float(tokens.sum()), len(tokens), query, float(self.step.prompt.sum()))


def execution_mode(step: ScheduledStep, largest_graph_tokens: int | None) -> ExecutionMode:
    """Which set of coefficients a step belongs to."""
    if largest_graph_tokens is not None and int(step.tokens.sum()) > largest_graph_tokens:
        return ExecutionMode.BEYOND_GRAPH
    even = not step.prompt.any() and len(step.tokens) > 0 and bool((step.tokens == step.tokens[0]).all())
    return ExecutionMode.UNIFORM if even else ExecutionMode.RAGGED
