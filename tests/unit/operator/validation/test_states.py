"""What a pod answers is a state within bounds, or no state with a reason: never an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.model_sources import MOST_ADAPTERS
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import MOST_SLO_CLASSES
from outrider_operator.validation.reading import InvalidInput
from outrider_operator.validation.reports import MOST_BYTES, MOST_COUNT, MOST_FIELDS, MOST_ITEMS, runtime_state

STATE: dict[str, Any] = {
    "schemaVersion": 1, "service": "chat", "namespace": "ns", "revision": "r", "configHash": "h", "startedAt": 1.0,
    "now": 2.0, "ready": True, "pluginActive": True, "outputTokens": 7,
}  # fmt: skip

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*STATE, "drafters", "x"]), inner),
    max_leaves=10,
)


@pytest.mark.parametrize("number", ["9" * 400, "1" + "0" * 30, "-1", "1e300", "NaN", "Infinity", "9" * 5000])
@pytest.mark.parametrize("field", ["outputTokens", "busyS", "startedAt"])
def test_an_absurd_number_is_no_state(field: str, number: str) -> None:
    """400 digits ended the loop that polls all pods; 10^30 tokens had the status refused for ever."""
    body = json.dumps({**STATE, field: "@"}).replace('"@"', number)
    assert isinstance(runtime_state(body.encode()), InvalidInput)


def test_the_largest_count_fits_the_status() -> None:
    """Sums over a thousand pods stay within 64 bits."""
    state = runtime_state(json.dumps({**STATE, "outputTokens": MOST_COUNT}).encode())
    assert isinstance(state, RuntimeState)
    assert 1000 * state.output_tokens < 2**63


def test_a_divisor_of_almost_nothing_is_nothing() -> None:
    """1e-300 seconds would make a speed-up of 10^300."""
    speedup = {"baselineS": 1e-300, "baselineTokens": 1, "speculativeS": 1.0, "speculativeTokens": 1}
    state = runtime_state(json.dumps({**STATE, "speedup": speedup}).encode())
    assert isinstance(state, RuntimeState)
    assert state.speedup.baseline_s == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'{"a":' * 9_000, b" " * (MOST_BYTES + 1)],
    ids=lambda body: repr(body[:8]),
)
def test_what_is_no_state_is_said_to_be_none(body: bytes) -> None:
    assert isinstance(runtime_state(body), InvalidInput)


def test_long_texts_are_cut() -> None:
    """A sentence of a pod ends in conditions; a thousand pods' states are in memory."""
    state = runtime_state(json.dumps({**STATE, "configError": "x" * 10_000}).encode())
    assert isinstance(state, RuntimeState)
    assert len(state.config_error) == 2048


def test_lists_and_objects_of_a_state_are_bounded() -> None:
    """A thousand pods' states are in memory, and every decision walks through them."""
    lists = {
        "drafters": [{"name": f"d{i}", "loaded": True} for i in range(100)],
        "adapters": [{"name": "a", "finished": {f"c{j}": 1 for j in range(1000)}}],
    }
    state = runtime_state(json.dumps({**STATE, **lists}).encode())
    assert isinstance(state, RuntimeState)
    assert len(state.drafters) == MOST_ITEMS
    assert len(state.adapters[0].finished) == MOST_FIELDS


def test_a_service_with_all_that_it_may_have_fits_into_a_state() -> None:
    """Bug: the bound of lists was for drafters and histograms, and adapters beyond it were lost."""
    classes = {f"{'c' * 38}{i}": 10**9 for i in range(MOST_SLO_CLASSES)}
    adapters = [
        {"name": f"{'a' * 250}{i}", "reason": "x" * 300, "finished": classes, "attained": classes}
        for i in range(MOST_ADAPTERS)
    ]
    state = runtime_state(json.dumps({**STATE, "adapters": adapters}).encode())
    assert isinstance(state, RuntimeState)
    assert len(state.adapters) == MOST_ADAPTERS


@pytest.mark.parametrize("field", ["drafters", "sloClasses", "draftLengthSteps"])
def test_what_is_beyond_a_list_s_bound_is_not_even_validated(field: str) -> None:
    """64 KiB of empty classes took 120 ms a poll: three errors for each of 21,500, with a dict for every one."""
    histograms: dict[str, Any] = {"tpot": {"counts": []}, "ttft": {"counts": []}}
    first: dict[str, Any] = {"drafters": {"name": "d", "loaded": True}, "sloClasses": {"name": "c", **histograms}}
    items = [first.get(field, 1)] * MOST_ITEMS + [{}] * 20_000
    assert isinstance(runtime_state(json.dumps({**STATE, field: items}, separators=(",", ":")).encode()), RuntimeState)


@given(JSON)
def test_anything_at_all_is_read_or_refused(document: Any) -> None:
    """Whatever the types: no exception."""
    merged = {**STATE, **document} if isinstance(document, dict) else document
    answer = runtime_state(json.dumps(merged).encode())
    assert isinstance(answer, RuntimeState | InvalidInput)
