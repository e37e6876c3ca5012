"""Exceptions in the loop: one costs a step its drafts, a run of them suspends the drafters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.engines import eagle, lookup
from tests.unit.control import columns
from tests.unit.loop.pods import control_loop

POOL = (lookup(), eagle())


def failing(monkeypatch: pytest.MonkeyPatch, now_s: list[float]) -> Any:
    """A loop whose decision on drafters raises."""
    loop = control_loop(POOL, clock=lambda: now_s[0])

    def fail(_batch: object) -> object:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(loop._controller, "plan_draft", fail)
    return loop


def suspended(loop: Any) -> list[bool]:
    return [bool(drafter.suspended) for drafter in loop.state().drafters.values()]


def test_failed_decision_costs_one_step_its_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: one exception suspended all drafters for half a minute, and the log named no request."""
    loop = failing(monkeypatch, [0.0])
    loop.request_names = ["chatcmpl-7"]
    plan = loop.plan_draft(columns.batch(1, 2))
    assert not plan.passes.any()
    assert loop.failures == 1
    assert suspended(loop) == [False, False]
    assert "chatcmpl-7" in caplog.text


@pytest.mark.parametrize(("every_s", "suspends"), [(1.0, True), (40.0, False)])
def test_run_of_failures_suspends_the_drafters(monkeypatch: pytest.MonkeyPatch, every_s: float, suspends: bool) -> None:
    now_s = [0.0]
    loop = failing(monkeypatch, now_s)
    for _ in range(3):
        now_s[0] += every_s
        loop.plan_draft(columns.batch(1, 2))
    assert suspended(loop) == [suspends, suspends]
    assert np.isfinite(loop.failures)
