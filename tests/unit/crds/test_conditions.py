"""Conditions keep Kubernetes' conventions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from outrider_crds.conditions import (
    ConditionReason,
    ConditionStatus,
    ConditionType,
    condition,
    find_condition,
    initial_conditions,
    set_condition,
    timestamp,
)

NOON = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
READY = condition(
    ConditionType.READY, ConditionStatus.TRUE, ConditionReason.ENDPOINT_READY, "1 pod is ready.", generation=1
)


def test_the_transition_time_moves_only_with_the_status() -> None:
    """Another reason, message or generation is no transition."""
    first = set_condition([], READY, NOON)
    reworded = READY.model_copy(update={"message": "2 pods are ready.", "observed_generation": 2})
    second = set_condition(first, reworded, NOON + timedelta(minutes=1))
    assert second[0].last_transition_time == "2026-01-01T12:00:00Z"
    assert (second[0].message, second[0].observed_generation) == ("2 pods are ready.", 2)
    lost = condition(ConditionType.READY, ConditionStatus.FALSE, ConditionReason.NO_READY_ENDPOINT, "No pod is ready.")
    third = set_condition(second, lost, NOON + timedelta(minutes=2))
    assert third[0].last_transition_time == "2026-01-01T12:02:00Z"


def test_a_condition_keeps_its_place_and_its_neighbours() -> None:
    """`kubectl describe` shows them in one order for the life of a service."""
    conditions = initial_conditions([], 1, NOON)
    changed = set_condition(conditions, READY, NOON)
    assert [c.type for c in changed] == list(ConditionType)
    assert [c for c in changed if c.type != ConditionType.READY] == [
        c for c in conditions if c.type != ConditionType.READY
    ]


def test_every_type_is_there_at_first_sight() -> None:
    """`kubectl wait` for a condition that was never set must not fail because it is missing."""
    conditions = initial_conditions(set_condition([], READY, NOON), 3, NOON)
    assert {c.type for c in conditions} == set(ConditionType)
    assert find_condition(conditions, ConditionType.READY) == set_condition([], READY, NOON)[0]
    pending = find_condition(conditions, ConditionType.UPDATED)
    assert pending is not None
    assert (pending.status, pending.reason, pending.observed_generation) == ("Unknown", "Pending", 3)


def test_a_message_beyond_the_limit_is_cut_not_refused() -> None:
    """A pod's last lines may be long; the status write must not fail for them."""
    long = condition(ConditionType.READY, ConditionStatus.FALSE, ConditionReason.POD_CRASHING, "x" * 5000)
    assert len(long.message) == 2048
    assert long.message.endswith("…")


def test_times_are_utc_whatever_the_zone() -> None:
    """A time without a zone is a mistake of the caller's."""
    assert timestamp(datetime(2026, 1, 1, 14, 0, tzinfo=timezone(timedelta(hours=2)))) == "2026-01-01T12:00:00Z"
    with pytest.raises(ValueError, match="zone"):
        timestamp(datetime(2026, 1, 1, 14, 0))
