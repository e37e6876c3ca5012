"""The loop at the limits of an engine: no exception, and nothing that is not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
from outrider_runtime.loop.steps import FinishedStep

from tests.engine.engines import TARGET, draft_model, eagle, lookup
from tests.unit.loop import test_stepper
from tests.unit.loop.pods import control_loop, stepper

REQUESTS = 1024
POOL = (*(lookup(f"lookup{number}") for number in range(6)), eagle(), draft_model(TARGET))


@pytest.mark.parametrize("step_s", [0.01, math.nan], ids=["finite times", "NaN from the device"])
def test_loop_survives_thousand_requests_replaced_at_once(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Eight drafters, a request of 200,000 tokens, and every request of a step gone before the next one."""
    monkeypatch.setattr(test_stepper, "RUNNING", REQUESTS)
    monkeypatch.setattr(test_stepper, "BUDGET", 8192)
    loop = control_loop(POOL, max_requests=REQUESTS, scores_placeholders=True)
    finished: list[FinishedStep] = []
    loop.listeners.append(finished.append)
    engine = test_stepper.Engine(stepper(loop, block_ids=test_stepper.blocks), 1, np.random.default_rng(0))
    monkeypatch.setattr(test_stepper, "STEP_S", step_s)
    engine.add(200_000, 10)
    for _ in range(2):
        for _ in range(REQUESTS - len(engine.running) - len(engine.waiting)):
            engine.add(6, 40)
        for _ in range(6):
            engine.step()
        while engine.running:
            engine.abort(0)
    while engine.flights:
        engine.land()
    state = loop.state()
    assert loop.failures == 0
    assert finished
    assert state.tally.output_tokens > REQUESTS
    assert all(math.isfinite(value) for value in (state.tally.busy_s, state.tally.batch_busy_s, state.decision_s))
    assert np.isfinite(loop._controller._evidence.latency.beliefs.target.costs).all()
    assert np.isfinite(loop._controller._evidence.acceptance.acceptance_rates).all()
