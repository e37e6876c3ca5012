"""The two documents of a canary: what the operator orders, and the sums that a pod reports."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from outrider_crds.counters import ArmCounters
from outrider_crds.runtime_config import CanaryConfig, HotConfig, config_hash, read_hot_config
from outrider_crds.runtime_state import CanaryState, RuntimeState
from pydantic import ValidationError

from tests.unit.crds.contract_examples import documents

ORDER: dict[str, Any] = {
    "id": "8a1e/1", "stable": ["ngram", "head-was"], "candidate": ["ngram", "head"], "candidatePercent": 50,
}  # fmt: skip


def test_canary_order_is_read_by_name_and_absent_by_default() -> None:
    hot = documents()["hot-config"]
    assert "canary" not in hot
    read, digest = read_hot_config(json.dumps({**hot, "canary": ORDER}).encode())
    assert read.canary == CanaryConfig(
        id="8a1e/1", stable=["ngram", "head-was"], candidate=["ngram", "head"], candidate_percent=50
    )
    assert digest == config_hash(read)
    assert HotConfig.read(json.dumps({**hot, "canary": {**ORDER, "shadow": True}})).canary == read.canary


@pytest.mark.parametrize(
    "change", [{"id": ""}, {"candidatePercent": 101}, {"candidatePercent": -1}, {"stable": ["ngram", "ngram"]}]
)
def test_canary_order_out_of_range_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CanaryConfig.model_validate({**ORDER, **change})


@pytest.mark.parametrize(
    "change", [{"priceS": math.nan}, {"priceSquared": math.inf}, {"tokens": -1}, {"attained": {"a": -1}}]
)
def test_sum_that_is_no_sum_is_refused(change: dict[str, Any]) -> None:
    """A NaN would make every later judgement of the canary one."""
    with pytest.raises(ValidationError):
        ArmCounters.model_validate(change)


@pytest.mark.parametrize("change", [{"priceS": 1e300}, {"tokens": 10**400}, {"finished": {"a": 10**19}}])
def test_sum_beyond_any_canary_is_refused(change: dict[str, Any]) -> None:
    """Bug: the judge overflowed at such a sum, so that the service was not reconciled while the pod lived."""
    with pytest.raises(ValidationError):
        ArmCounters.model_validate(change)


def test_state_with_sums_survives_the_wire() -> None:
    arm = ArmCounters(requests=2, tokens=30, plain_s=0.75, price_s=0.5, plain_squared=0.3, price_squared=0.13,
                   plain_times_price=0.2, failures=1, finished={"chat": 2}, attained={"chat": 1})  # fmt: skip
    canary = CanaryState(id="a", candidate=arm)
    state = documents()["state"]
    assert RuntimeState.read(json.dumps(state)).canary is None
    assert RuntimeState.read(json.dumps({**state, "canary": canary.wire()})).canary == canary
