"""What a profiling Job leaves is a result within bounds, or none with a reason: never an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.profile import TERMINATION_MESSAGE_LIMIT, ProfilingResult
from outrider_operator.validation.reading import InvalidInput
from outrider_operator.validation.reports import PROFILER, profiling_result, termination_of

TARGET: dict[str, Any] = {
    "schemaVersion": 1, "key": "k", "model": "m", "product": "cpu", "measuredAt": "2026-11-21T12:00:00Z",
    "errorPercent": 3.0, "costs": {"uniform": {"constantS": 0.02}},
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*TARGET, "target", "drafters", "failures"]), inner)
    ),
    max_leaves=10,
)


def test_a_result_is_read() -> None:
    result = profiling_result(_message())
    assert isinstance(result, ProfilingResult)
    assert result.target is not None
    assert result.target.error_percent == 3.0


@pytest.mark.parametrize(
    "field", [{"measuredAt": "9" * 300}, {"measuredAt": "soon"}, {"costs": {"uniform": {"constantS": -1}}}], ids=str
)
def test_an_absurd_value_is_no_result(field: dict[str, Any]) -> None:
    """A `measuredAt` of 300 characters raised wherever its age was read: that service's status stopped."""
    assert isinstance(profiling_result(_message(**field)), InvalidInput)


@pytest.mark.parametrize(
    "costs",
    [
        {},
        {"uniform": {}},
        {"uniform": {"constantS": 0.02}, "varlen": {"perBatchedTokenAboveKneeS": 1.0, "kneeTokens": 1e6}},
    ],
    ids=["none", "zero", "zero below a knee"],
)
def test_a_step_that_takes_no_time_is_no_measurement(costs: dict[str, Any]) -> None:
    """A Job that reported steps for nothing made each look at its service raise: its scaling and its status stopped."""
    parsed = profiling_result(_message(costs=costs))
    assert isinstance(parsed, InvalidInput)
    assert parsed.detail.startswith("target.costs")


@pytest.mark.parametrize("number", ["9" * 400, "9" * 3900, "NaN", "1e999"], ids=lambda number: number[:5])
@pytest.mark.parametrize("field", ["errorPercent", "schemaVersion"])
def test_an_absurd_number_is_no_result(field: str, number: str) -> None:
    assert isinstance(profiling_result(_message(**{field: "@"}).replace('"@"', number)), InvalidInput)


@given(JSON)
def test_any_document_is_a_result_or_none(document: Any) -> None:
    assert isinstance(
        profiling_result(json.dumps({"schemaVersion": 1, "target": document})), ProfilingResult | InvalidInput
    )


@given(st.text() | st.sampled_from(["[" * 4000, '{"a":' * 800]))
def test_any_text_is_a_result_or_none(message: str) -> None:
    assert isinstance(profiling_result(message), ProfilingResult | InvalidInput)


def test_the_last_words_are_those_of_the_container_that_measures() -> None:
    words = termination_of({"status": {"containerStatuses": [_ended("sidecar", "bye"), _ended(PROFILER, "x" * 9999)]}})
    assert words is not None
    assert words.message == "x" * TERMINATION_MESSAGE_LIMIT
    assert words.exit_code == 1


@pytest.mark.parametrize("pod", [None, {}, {"status": None}, {"status": {"containerStatuses": [{"name": PROFILER}]}}])
def test_a_running_container_has_no_termination(pod: dict[str, Any] | None) -> None:
    assert termination_of(pod) is None


def _message(**fields: Any) -> str:
    return json.dumps({"schemaVersion": 1, "target": {**TARGET, **fields}})


def _ended(container: str, message: str) -> dict[str, Any]:
    return {"name": container, "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": message}}}
