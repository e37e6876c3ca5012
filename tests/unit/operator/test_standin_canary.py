"""The stand-in's canary sums, as the operator's judge reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from outrider_crds.counters import ArmCounters
from outrider_crds.runtime_config import CanaryConfig
from outrider_operator.decide.canary.arms import Arms
from outrider_operator.decide.canary.judge import CanaryVerdict, judge

from tests.engine.engines import boot_config, hot_config, lookup
from tests.operator.standin.state import Behaviour, runtime_state

CANARY = CanaryConfig(id="a", stable=["pld"], candidate=["new"], candidate_percent=50)
BUSY = Behaviour(tokens_per_s=100.0)


def _arms(behaviour: Behaviour, seconds: float) -> Arms:
    hot = hot_config().model_copy(update={"canary": CANARY})
    boot = boot_config([lookup(), lookup("new")])
    state = runtime_state(boot, hot, behaviour, started_at=1.0, ready=True, product="cpu", profiled=True,
                          streamed_tokens=0, canary_since=1.0)  # fmt: skip
    state = state.model_copy(update={"reported_at": 1.0})
    assert state.canary is not None
    scale = (
        seconds
        * behaviour.canary_requests_per_s
        / max(1, state.canary.stable.requests + state.canary.candidate.requests)
    )
    return Arms(_scaled(state.canary.stable, scale), _scaled(state.canary.candidate, scale))


def _scaled(arm: ArmCounters, scale: float) -> ArmCounters:
    numbers: dict[str, Any] = {
        name: value * scale for name, value in arm if isinstance(value, int | float) and name != "failures"
    }
    return ArmCounters.model_construct(**numbers, failures=arm.failures)


@pytest.mark.parametrize(
    ("behaviour", "verdict"),
    [
        (BUSY, CanaryVerdict.BETTER),
        (replace(BUSY, worse="new"), CanaryVerdict.WORSE),
        (replace(BUSY, canary_gain_percent=-3.0), CanaryVerdict.OPEN),
        (replace(BUSY, canary_failures=2), CanaryVerdict.DRAFTER_FAILED),
    ],
)
def test_standin_canary_gets_the_verdict_that_is_ordered(behaviour: Behaviour, verdict: CanaryVerdict) -> None:
    """Cluster tests wait for these verdicts; a minute of the stand-in is enough for each."""
    assert judge({"cpu": _arms(behaviour, 60.0)}, least_gain=-0.03, min_requests=100).verdict is verdict


def test_standin_of_an_older_release_reports_no_canary() -> None:
    hot = hot_config().model_copy(update={"canary": CANARY})
    state = runtime_state(boot_config([lookup()]), hot, replace(BUSY, without_canary=True), started_at=1.0, ready=True,
                          product="cpu", profiled=True, streamed_tokens=0)  # fmt: skip
    assert state.canary is None
