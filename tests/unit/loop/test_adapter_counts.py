"""Acceptance and SLO attainment by LoRA adapter, through the stepper and the request table."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
from outrider_crds.runtime_state import AdapterState
from outrider_crds.spec import SLOClassSpec
from outrider_runtime.loop.adapter_counts import AdapterCounter
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.request_table import End
from outrider_runtime.loop.stepper import Room, Stepper, View
from outrider_runtime.loop.steps import NOTHING_SCORED, ChainCounts
from outrider_runtime.vllm_plugin.messages import DraftReport

from tests.engine.engines import hot_config, lookup
from tests.unit.loop.pods import control_loop, stepper

ADAPTERS = {"a": "support", "b": "legal", "c": None}
CLASS = SLOClassSpec(name="chat", tpot="50ms", ttft="1s")


def arrived(*, ago_s: float = 0.0) -> tuple[ControlLoop, Stepper]:
    """Three requests in one batch: two of different adapters, and one of the target."""
    loop = control_loop((lookup(),), max_requests=3)
    loop.configure(hot_config().model_copy(update={"slo_classes": [CLASS], "default_slo_class": "chat"}))
    loop.pin(2, "pld")
    steps = stepper(loop)
    for name, adapter in ADAPTERS.items():
        steps.requests.arrived(name, time.time() - ago_s, None, prompt=4, limit=40, adapter=adapter)
    return loop, steps


def states(loop: ControlLoop) -> dict[str, AdapterState]:
    return {state.name: state for state in loop.adapters.states(loop.class_names)}


def test_proposals_count_for_the_adapter_of_their_request() -> None:
    """Both of the first request's proposals are accepted, the second's only one is not; the third has no adapter."""
    loop, steps = arrived()
    ones, proposed = np.ones(3, np.int64), np.array([2, 1, 1])
    view = View(list(ADAPTERS), 4 * ones, 5 * ones, ones, ones)
    number, _ = steps.draft(view, ones, 0 * ones, Room(1.0, 64, 64), steps.nothing_to_verify(3))
    report = DraftReport(number, np.zeros(1), proposed.astype(np.int8), np.zeros(3, np.int8))
    steps.on_draft_reports([report])
    steps.on_output(number, output_at=1.1, target_s=0.05, tokens=3, verdicts=NOTHING_SCORED)
    plan = steps.verify(view, proposed, Room(1.2, 64, 64))
    number, _ = steps.draft(view, 1 + proposed, proposed, Room(1.2, 64, 64), plan)
    verdicts = ChainCounts(np.array([3, 1, 2]), proposed)
    steps.on_draft_reports([DraftReport(number, np.zeros(1), np.zeros(3, np.int8), np.zeros(3, np.int8) - 1)])
    steps.on_output(number, output_at=1.3, target_s=0.05, tokens=6, verdicts=verdicts)
    counts = {name: (state.tried, state.accepted) for name, state in states(loop).items()}
    assert counts == {"support": (2, 2), "legal": (1, 0)}


def test_ended_requests_count_for_their_adapter_and_class() -> None:
    """Time to first token is measured from the arrival: after 5 s both miss the class, and the counts say whose."""
    loop, steps = arrived(ago_s=5.0)
    now_s = time.monotonic()
    steps.requests.deliver([(name, 1, None) for name in ADAPTERS], now_s)
    steps.requests.deliver([(name, 1, End.COMPLETE) for name in ("a", "c")], now_s + 0.01)
    late = states(loop)
    assert (late["support"].finished, late["support"].attained) == ({"chat": 1}, {"chat": 0})
    assert late["support"].output_tokens == 2
    assert (late["legal"].finished, late["legal"].output_tokens) == ({"chat": 0}, 0)
    steps.requests.arrived("d", time.time(), None, prompt=4, limit=40, adapter="legal")
    steps.requests.deliver([("d", 1, End.COMPLETE)], time.monotonic())
    assert (states(loop)["legal"].finished, states(loop)["legal"].attained) == ({"chat": 1}, {"chat": 1})


def test_report_while_adapters_arrive_loses_none() -> None:
    """Bug: a name without its counts ended the reporter's look with a ValueError."""
    counter = AdapterCounter()
    arriving = threading.Thread(target=lambda: [counter.number(str(name)) for name in range(2000)])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        arriving.start()
        while arriving.is_alive():
            counter.states(["chat"])
    finally:
        sys.setswitchinterval(before)
        arriving.join()
    assert len(counter.states(["chat"])) == 2000


def test_without_adapters_nothing_is_counted() -> None:
    loop = control_loop((lookup(),), max_requests=3)
    steps = stepper(loop)
    steps.requests.arrived("a", time.time(), None, prompt=4, limit=40)
    slots = steps.requests.running(["a"])
    assert steps.requests.adapters(slots) is None
    assert states(loop) == {}
