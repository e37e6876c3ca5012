"""The draft-prefill gate's threshold, and the price of time."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_runtime.control.batch import Batch, ExecutionMode, RequestView
from outrider_runtime.control.costs import DrafterCost, LatencyModel, Shape, StepCost
from outrider_runtime.control.gate import HOLD_STEPS, WINDOW_STEPS, DraftGate, pays_for
from outrider_runtime.control.goodput import Goodput
from outrider_runtime.control.latency import OnlineLatency
from outrider_runtime.control.problem import this_step
from outrider_runtime.control.settings import DrafterSpec

COST = StepCost(per_batched_token_s=1e-3, constant_s=0.02)


def closed_at(requests: int) -> DraftGate:
    gate = DraftGate()
    for _ in range(HOLD_STEPS):
        gate.update(requests, worth=False)
    return gate


def test_one_bad_step_does_not_close_the_gate():
    """A hole in the draft's KV costs a forward to close, so a flicker must not make one."""
    gate = DraftGate()
    for _ in range(5 * HOLD_STEPS):
        gate.update(16, worth=False)
        gate.update(16, worth=True)
    assert not gate.closed(16)


def test_the_gate_remembers_the_batch_at_which_the_draft_stopped_to_pay():
    """TurboSpec section 4.2: above the threshold the draft's prefill is skipped, below it runs."""
    gate = closed_at(16)
    assert gate.closed(16)
    assert gate.closed(40)
    assert not gate.closed(15)


def test_the_gate_opens_with_hysteresis():
    """Near the threshold it takes two looks that find the draft worth running, well below it one."""
    gate = closed_at(16)
    gate.update(15, worth=True)
    assert gate.closed(16)
    gate.update(15, worth=True)
    assert not gate.closed(16)
    gate = closed_at(16)
    gate.update(4, worth=True)
    assert not gate.closed(16)


def test_a_closed_gate_lets_a_request_through_for_a_while():
    """Or it would never learn that the traffic has changed."""
    gate = closed_at(16)
    gate.let_through()
    assert not gate.closed(16)
    for _ in range(WINDOW_STEPS):
        gate.step()
    assert gate.closed(16)


def test_at_a_steady_batch_lambda_is_measured_goodput():
    """Whatever the model says plain decoding would give there."""
    goodput = Goodput()
    for _ in range(500):
        goodput.observe(tokens=12, step_s=0.02, plain_rate=400.0)
    assert goodput.tokens_per_s == pytest.approx(600)
    assert goodput.rate(400.0) == pytest.approx(600, rel=0.02)


def test_lambda_is_right_from_the_first_step_after_a_jump_of_the_load():
    """From 24 requests to one: goodput falls to an eighth at once, the price of time with it."""
    goodput = Goodput()
    for _ in range(500):
        goodput.observe(tokens=24, step_s=0.046, plain_rate=521.0)
    assert goodput.rate(67.0) == pytest.approx(67, rel=0.02)


KNEE = StepCost(per_batched_token_s=1e-5, per_batched_token_above_knee_s=1e-3, knee_tokens=16, constant_s=0.02)
PATH = np.array([0.5, 0.25, 0.12])


@pytest.mark.parametrize(("requests", "pays"), [(1, True), (4, True), (15, False), (48, False)])
def test_what_pays_for_a_few_does_not_pay_in_a_crowd(requests: int, pays: bool) -> None:
    """Below the knee a verified token is nearly free; beyond it a token costs more than half a token brings."""
    latency = OnlineLatency(
        LatencyModel({ExecutionMode.UNIFORM: KNEE}, {"eagle": DrafterCost(StepCost(constant_s=1e-3))}),
        (DrafterSpec("eagle", neural=True),), None,
    )  # fmt: skip
    assert pays_for(requests, 300.0, PATH, "eagle", latency, Goodput()) == pays


def test_a_draft_pays_as_long_as_nothing_is_known() -> None:
    """Bug: the first prompt of a pod without a profile divided by a step time of 0 and took the engine along."""
    latency = OnlineLatency(None, (DrafterSpec("eagle", neural=True),), None)
    assert pays_for(40, 300.0, PATH, "eagle", latency, Goodput())


def test_beside_a_prompt_a_second_is_worth_what_it_is_without():
    """Bug: the prompt's time made the batch look slow and time cheap, and proposals were verified beside it that cost
    more than they brought."""
    latency = OnlineLatency(LatencyModel(dict.fromkeys(ExecutionMode, COST)), (), None)
    decoding = [RequestView(f"r{number}", None, 100, 0, 0, 5, 50, 1.0, draft_ready=True) for number in range(8)]
    prompt = RequestView("prompt", None, 0, 300, 0, 0, 50, 0.0, draft_ready=False)

    def rate(*views: RequestView) -> float:
        return this_step(Batch(views, 1.0, 2048, 10_000), latency, Goodput()).rate

    assert rate(*decoding) == pytest.approx(8 / COST.seconds(Shape(800, 8, 8)))
    assert rate(*decoding, prompt) == pytest.approx(rate(*decoding))
