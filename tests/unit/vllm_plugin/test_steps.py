"""From what engine and worker report to what the controller learns of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_runtime.control.batch import DraftPlan, ExecutionMode, RequestView, StepOutcome, VerifyPlan
from outrider_runtime.vllm_plugin.messages import DraftReport, StepReport, idle_order, numbers
from outrider_runtime.vllm_plugin.steps import (
    Asked,
    StepRecord,
    execution_mode,
    plain_step_size,
    step_outcome,
    step_size,
    with_drafts,
)


def view(name: str, prefill: int = 0) -> RequestView:
    return RequestView(name, None, 50, prefill, 0, 5, 20, 0.5)


def outcome(
    *, scheduled_at: float = 10.0, last_output_at: float = 9.9, now: float = 10.03, report: StepReport | None = None
) -> StepOutcome:
    """One request that decodes with two proposals, of which one is accepted, beside a prompt chunk."""
    views = (view("a"), view("b", prefill=16))
    record = StepRecord(
        scheduled_at, step_size(views, {"a": 3, "b": 16}, None), VerifyPlan((2, 0)),
        DraftPlan(0, (None, None), False, False), idle_order(2, 2), [(views[0], Asked("pld", 3, 2))],
    )  # fmt: skip
    found = step_outcome(record, report, {"a": 2}, {"a": 3}, now=now, last_output_at=last_output_at, tokens=3)
    return found if report is None else with_drafts(found, record, report.drafts[0], ("pld", "eagle"))


def report(target_s: float, **drafts_s: float) -> StepReport:
    taken = np.array([drafts_s.get(name, math.nan) for name in ("pld", "eagle")])
    return StepReport(target_s, [DraftReport(0, taken, numbers([0, 0]), numbers([-1, -1]))])


@pytest.mark.parametrize(
    ("last_output_at", "seconds"), [(9.0, 0.03), (10.01, 0.02)], ids=["after a pause", "steps that overlap"]
)
def test_a_steps_time_is_its_own(last_output_at, seconds):
    """`t_out(n) - max(t_out(n-1), t_sched(n))`: neither the wait for a request nor the step before counts."""
    assert outcome(last_output_at=last_output_at).step_s == pytest.approx(seconds)


def test_a_decoding_request_is_told_apart_from_a_prompt():
    """Trials are the scored proposals up to the first rejection; a prompt chunk has none."""
    step = outcome(report=report(0.02, pld=0.001))
    (request,) = step.requests
    assert (request.id, request.asked, request.proposed, request.verified) == ("a", 3, 2, 2)
    assert (request.accepted, request.tried) == (1, 2)
    assert (step.n_batched, step.n_context, step.prefill_tokens) == (19, 100, 16)
    assert (step.n_requests, step.n_decoding) == (2, 1)
    assert step.mode is ExecutionMode.RAGGED
    assert step.draft_s == {"pld": 0.001}


def test_a_step_that_nobody_timed_is_not_taken_for_a_free_one():
    """An engine without the plugin's worker reports no times."""
    step = outcome()
    assert math.isnan(step.target_s)
    assert step.draft_s == {}
    assert math.isnan(outcome().target_s)


def test_a_step_belongs_to_the_graphs_that_ran_it():
    """Equal lengths, unequal ones or a prompt, and beyond the largest graph."""
    views = (view("a"), view("b"))
    assert execution_mode(views, {"a": 3, "b": 3}, 64) is ExecutionMode.UNIFORM
    assert execution_mode(views, {"a": 3, "b": 2}, 64) is ExecutionMode.RAGGED
    assert execution_mode(views, {"a": 33, "b": 33}, 64) is ExecutionMode.BEYOND_GRAPH
    assert execution_mode(views, {"a": 33, "b": 33}, None) is ExecutionMode.UNIFORM


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=8), st.none() | st.integers(1, 8))
def test_a_plain_step_has_its_size_without_a_look_at_its_requests(contexts, largest_graph):
    views = [view(str(number))._replace(context_tokens=context) for number, context in enumerate(contexts)]
    counts = {one.id: 1 for one in views}
    assert plain_step_size(contexts, largest_graph) == step_size(views, counts, largest_graph)
