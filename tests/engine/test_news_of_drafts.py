"""In asynchronous scheduling a later output tells how a step's drafting went: nothing is lost or kept for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's imports warn

FAILED = SimpleNamespace(failures={0: "RuntimeError: broken"}, proposed=(), proposer=())


class Loop:
    """What the scheduler tells."""

    numbers = {"eagle": 0}

    def __init__(self):
        self.observed, self.failed = [], []

    def observe(self, outcome):
        self.observed.append(outcome)

    def drafter_failed(self, name, reason):
        self.failed.append((name, reason))


def control(monkeypatch: pytest.MonkeyPatch, *, has_speculator: bool, scheduled: int) -> Any:
    from outrider_runtime.vllm_plugin import scheduler

    monkeypatch.setattr(scheduler, "untimed", lambda outcome: outcome)
    made: Any = object.__new__(scheduler.OutriderAsyncScheduler)
    made.outrider, made._coverage, made._whole = Loop(), None, None
    made._drafting, made._told, made._is_told = {}, {}, has_speculator
    made._scheduled = dict.fromkeys(range(2, 2 + scheduled))
    return made


def step(number: int) -> SimpleNamespace:
    return SimpleNamespace(order=SimpleNamespace(step=number, drafts=True), asks=(), draft_plan=None)


def test_a_draft_that_failed_in_the_last_step_of_a_burst_is_suspended_in_the_next(monkeypatch):
    """The step counts once, at once; its failure is told when the worker tells of it."""
    engine = control(monkeypatch, has_speculator=True, scheduled=0)
    engine._settle(step(1), "outcome", None)
    assert engine.outrider.observed == ["outcome"]
    engine._drafted(*engine._drafting.pop(1), FAILED)
    assert engine.outrider.failed == [("eagle", "RuntimeError: broken")]
    assert engine.outrider.observed == ["outcome"]


@pytest.mark.parametrize("scheduled", [0, 1])
def test_a_pod_without_drafters_learns_from_its_steps_and_waits_for_no_news(monkeypatch, scheduled):
    """No worker tells how drafting went where there is no drafter."""
    engine = control(monkeypatch, has_speculator=False, scheduled=scheduled)
    engine._settle(step(1), "outcome", None)
    assert engine.outrider.observed == ["outcome"]
    assert not engine._drafting
