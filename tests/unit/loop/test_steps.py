"""Outcomes of steps, made from an engine's reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.control.pending_proposals import no_proposals
from outrider_runtime.control.plans import DraftPlan, ExecutionMode, Outcome, Purpose
from outrider_runtime.loop.coverage import ScheduledStep
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.loop.steps import ChainCounts, FinishedStep, Record, TargetResult, execution_mode
from outrider_runtime.vllm_plugin.messages import DraftReport, numbers

from tests.unit.control import columns

UNKNOWN = np.zeros((3, 0))
"""Confidences that the engine does not report."""


def step(*tokens: int, prompt: tuple[int, ...] = ()) -> ScheduledStep:
    count = len(tokens)
    names = ["a", "b", "c"][:count]
    context = np.full(count, 50)
    return ScheduledStep(
        names, np.arange(count), context, context, np.array(prompt or (0,) * count), np.array(tokens, np.int64)
    )  # fmt: skip


def plan(passes: list[int], drafter_order: list[int]) -> DraftPlan:
    feed = np.zeros((len(passes), len(drafter_order)), np.int64)
    return DraftPlan(np.array(passes), np.ones(len(passes), np.int64), np.array([drafter_order]), feed, Purpose.CHOICE)


def finished_step(
    *, drafted: DraftReport | None = None, gaps: tuple[KVGap, ...] = (), runs: tuple[bool, bool] = (False, True)
):
    """A decoding request with two of three proposals verified and one accepted, together with a prefill."""
    waits = no_proposals(4, 3)
    waits.ask(np.array([0, 1]), plan([3, 0], [0, NO_DRAFTER]), 1)
    waits.record(1, np.array([0, 1]), np.array([2, 0]), np.array([0, NO_DRAFTER]), UNKNOWN)
    this = step(4, 16, prompt=(0, 16))
    record = Record(
        2, 10.0, this, columns.batch(2, 2, prompt=[0, 16]), waits.of(np.array([0, 1])), Purpose.CHOICE,
        plan([0, 1], [1, NO_DRAFTER]), np.array(runs), gaps, None, np.array([3, 0]),
    )  # fmt: skip
    record.result = TargetResult(10.03, 0.03, 0.02, 3, ChainCounts(np.array([2, 0]), np.array([3, 0])))
    record.draft_report = drafted
    return FinishedStep(record.outcome(), this)


def report(seconds: float, catch_up_s: dict[int, float] | None = None) -> DraftReport:
    return DraftReport(2, np.array([math.nan, seconds]), numbers([0, 0]), numbers([-1, -1]), catch_up_s or {})


def test_trials_are_the_real_proposals_that_were_scored() -> None:
    """Placeholders without a proposal are scored, too, and are no trials; a prefill has none."""
    outcome: Outcome = finished_step(drafted=report(0.001)).outcome
    assert outcome.forest.request.tolist() == [0, 0]
    assert outcome.forest.drafter.tolist() == [0, 0]
    assert outcome.verified.tolist() == [True, True]
    assert outcome.accepted.tolist() == [True, False]
    assert outcome.forest.lengths.tolist() == [3, 0]
    assert outcome.scored_tokens == 3, "what the target's time is explained by"
    assert outcome.forest.placeholders is not None
    assert not outcome.forest.placeholders.any()


def test_the_targets_pass_held_every_token_that_was_scheduled() -> None:
    shape = finished_step(drafted=report(0.001)).shape
    assert (shape.n_batched, shape.n_context, shape.n_requests, shape.n_prompt) == (20, 100, 2, 16)
    assert shape.n_context_query == 1.0


def test_time_of_filling_gaps_counts_for_the_drafter() -> None:
    outcome = finished_step(drafted=report(0.001, {1: 0.004}), gaps=(KVGap(1, 0, 10, 50),)).outcome
    assert math.isnan(outcome.draft_s[0])
    assert outcome.draft_s[1] == pytest.approx(0.005)


def test_step_with_unreported_drafting_has_no_time() -> None:
    assert math.isnan(finished_step().outcome.step_s)
    assert math.isnan(finished_step().outcome.target_s)
    alone = finished_step(runs=(False, False)).outcome
    assert (alone.step_s, alone.target_s) == (0.03, 0.02)


@pytest.mark.parametrize(
    ("scheduled", "largest", "mode"),
    [
        (step(3, 3), 64, ExecutionMode.UNIFORM),
        (step(3, 2), 64, ExecutionMode.VARLEN),
        (step(3, 3, prompt=(0, 3)), 64, ExecutionMode.VARLEN),
        (step(33, 33), 64, ExecutionMode.BEYOND_GRAPH),
        (step(33, 33), None, ExecutionMode.UNIFORM),
    ],
)
def test_a_step_belongs_to_the_graphs_that_ran_it(
    scheduled: ScheduledStep, largest: int | None, mode: ExecutionMode
) -> None:
    assert execution_mode(scheduled, largest) is mode


def test_proposals_are_placeholders_until_the_engine_reports() -> None:
    """A model stands in where the lookup finds nothing, so there are places for the longer of both."""
    slots, waits = np.array([0, 1, 2]), no_proposals(3, 3)
    order = np.array([[1, 1, NO_DRAFTER], [0, NO_DRAFTER, NO_DRAFTER]])
    feed = np.zeros((2, 3), np.int64)
    waits.ask(slots, DraftPlan(np.array([3, 2]), np.ones(2, np.int64), order, feed, Purpose.CHOICE), 1)
    forest = waits.of(slots).forest(2)
    assert np.bincount(forest.request).tolist() == [3, 2]
    assert forest.placeholders is not None
    assert forest.placeholders.tolist() == [True, True, False]
    waits.record(1, slots, np.array([3, 0, 0]), np.array([0, NO_DRAFTER, NO_DRAFTER]), UNKNOWN)
    forest = waits.of(slots).forest(2)
    assert np.bincount(forest.request).tolist() == [3]
    assert forest.placeholders is not None
    assert not forest.placeholders.any()


def test_report_counts_for_the_step_that_ordered_it() -> None:
    """Asynchronous scheduling: the news is older than the last plan, and a slot may have been left."""
    slots = np.array([0, 1, 2])
    waits = no_proposals(4, 3)
    waits.ask(slots, plan([2, 3], [0, 1, 1]), 1)
    taken = waits.of(slots)
    waits.ask(np.array([1]), plan([0, 1], [1]), 2)
    waits.clear(np.array([2]))
    confidence = np.array([[math.nan] * 3, [4.0, 3.0, math.nan], [math.nan] * 3])
    for proposals in (waits, taken):
        proposals.record(1, slots, np.array([1, 2, 3]), np.array([1, 1, NO_DRAFTER]), confidence)
    assert waits.length.tolist() == [1, 1, 0, 0]
    assert waits.drafter.tolist() == [1, 1, NO_DRAFTER, NO_DRAFTER]
    assert taken.length.tolist() == [1, 2, 3]
    assert taken.forest(2).drafter.tolist() == [1, 1, 1, 1, 1, 1]
    sure = taken.forest(2).confidence.tolist()
    assert sure == pytest.approx([math.nan, 4, 3, math.nan, math.nan, math.nan], nan_ok=True), "of each node"
    assert np.isnan(waits.forest(2).confidence).all(), "of a later plan nothing is known yet"
