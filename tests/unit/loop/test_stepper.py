"""The loop at every step, with the real controller and a small engine.

No request is ever counted for another one, and no order exceeds the engine's limits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_crds.spec import SLOClassSpec
from outrider_runtime.control.batch import NO_DRAFTER, Batch
from outrider_runtime.control.plans import Forest, VerifyPlan
from outrider_runtime.loop.pod_state import choice
from outrider_runtime.loop.request_table import Delivery, End
from outrider_runtime.loop.stepper import Room, Stepper, View, room_in_blocks
from outrider_runtime.loop.steps import NOTHING_SCORED, ChainCounts, FinishedStep
from outrider_runtime.vllm_plugin.messages import DraftReport, draft_order, numbers

from tests.engine.engines import TARGET, draft_model, eagle, hot_config, lookup
from tests.unit.loop.pods import control_loop, stepper

POOL = (lookup(), eagle(), draft_model(TARGET))
BUDGET, RUNNING, STEP_S = 64, 4, 0.01


@dataclass
class Request:
    name: str
    prompt: int
    most: int
    context: int = 0
    emitted: int = 0
    under_way: int = 0
    proposals: int = 0

    @property
    def todo(self) -> int:
        return max(0, self.prompt + self.emitted + self.under_way - self.context)


@dataclass
class Flight:
    number: int
    order: Any
    rows: list[tuple[Request, int, int]]
    """Request, tokens, those among them that are proposals."""


@dataclass
class Engine:
    """vLLM's books in a page. `ahead`: steps that are scheduled before the output of the first is there."""

    steps: Stepper
    ahead: int
    rng: np.random.Generator
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    flights: deque[Flight] = field(default_factory=deque)
    delivered: int = 0
    now_s: float = 0.0
    serial: Any = field(default_factory=itertools.count)

    def add(self, prompt: int, most: int) -> None:
        request = Request(f"r{next(self.serial)}", prompt, most)
        self.steps.requests.arrived(request.name, 0.0, None, prompt=prompt, limit=prompt + most)
        self.waiting.append(request)

    def step(self) -> None:
        self.now_s += STEP_S
        proposed = np.array([request.proposals for request in self.running], np.int64)
        plan = self.steps.verify(self._view(self.running), proposed, self._room())
        assert (plan.lengths <= proposed).all()
        for request, length in zip(self.running, plan.lengths.tolist(), strict=True):
            request.proposals = min(request.proposals, length)
        while self.waiting and len(self.running) < RUNNING:
            self.running.append(self.waiting.popleft())
        self._schedule(plan)
        while len(self.flights) > self.ahead:
            self.land()

    def _schedule(self, plan: Any) -> None:
        left, rows = BUDGET, list[tuple[Request, int, int]]()
        for request in self.running:
            tokens = min(left, request.todo + request.proposals)
            if tokens > 0:
                rows.append((request, tokens, max(0, tokens - request.todo)))
                left -= tokens
        if not rows:
            return
        view = self._view([request for request, _, _ in rows])
        counts, proposed = (np.array([row[column] for row in rows], np.int64) for column in (1, 2))
        number, order = self.steps.draft(view, counts, proposed, self._room(), plan)
        message = draft_order(number, order)
        assert sum(gap.end - gap.start for gap in message.gaps) <= BUDGET
        for gap in message.gaps:
            assert 0 <= gap.start < gap.end <= view.context[gap.request]
        self.flights.append(Flight(number, message, rows))
        for request, count, verified in rows:
            request.context += count
            if not request.todo:
                request.under_way += 1 + verified
            request.proposals = message.draft_tokens if not request.todo - request.under_way > 0 else 0

    def land(self) -> None:
        flight = self.flights.popleft()
        self.now_s += STEP_S
        self.steps.on_draft_reports([self._report(flight)])
        scored, sampled, out = [0] * len(flight.rows), [0] * len(flight.rows), list[Delivery]()
        for row, (request, _, verified) in enumerate(flight.rows):
            if request not in self.running or not request.under_way:
                continue
            kept = int(self.rng.integers(0, verified + 1))
            request.under_way -= 1 + verified
            request.context -= verified - kept
            tokens = min(1 + kept, request.most - request.emitted)
            request.emitted += tokens
            scored[row], sampled[row] = verified, 1 + kept
            ends = request.emitted >= request.most
            out.append((request.name, tokens, End.COMPLETE if ends else None))
            if ends:
                self._remove(request)
        self.delivered += self.steps.requests.deliver(out, self.now_s)
        self.steps.on_output(
            flight.number, output_at=self.now_s, target_s=STEP_S / 2, tokens=sum(tokens for _, tokens, _ in out),
            verdicts=ChainCounts(np.array(sampled), np.array(scored)),
        )  # fmt: skip

    def _report(self, flight: Flight) -> DraftReport:
        order = flight.order
        seconds = np.where(order.passes >= 0, 1e-4, math.nan)
        lengths = np.where(order.chosen == NO_DRAFTER, 0, order.passes[order.chosen])
        proposed = self.rng.integers(0, lengths + 1).astype(np.int8)
        proposer = np.where(proposed > 0, order.chosen, NO_DRAFTER).astype(np.int8)
        return DraftReport(flight.number, seconds, proposed, proposer, {gap.drafter: 1e-4 for gap in order.gaps})

    def abort(self, which: int) -> None:
        request = self.running[which % len(self.running)]
        self._remove(request)
        self.steps.requests.aborted(request.name, self.now_s, has_stop_strings=False)

    def preempt(self, which: int) -> None:
        request = self.running[which % len(self.running)]
        self._remove(request)
        request.context = request.under_way = request.proposals = 0
        self.waiting.appendleft(request)

    def _remove(self, request: Request) -> None:
        self.running.remove(request)
        self.steps.leaves(request.name)

    def _view(self, requests: list[Request]) -> View:
        columns = [
            [request.context for request in requests], [request.prompt + request.emitted for request in requests],
            [request.todo for request in requests], [request.emitted for request in requests],
        ]  # fmt: skip
        return View([request.name for request in requests], *(np.array(column, np.int64) for column in columns))

    def _room(self) -> Room:
        return Room(self.now_s, BUDGET, 10**6)


def blocks(name: str, first: int, last: int) -> list[int]:
    """Each request has blocks of its own."""
    return [1000 * int(name[1:]) + number for number in range(first, min(last, 100) + 1)]


ADD, STEP, ABORT, PREEMPT, LAND = range(5)
events = st.tuples(st.sampled_from([ADD, ADD, STEP, STEP, STEP, STEP, ABORT, PREEMPT, LAND]), st.integers(1, 150))


@settings(max_examples=25, deadline=None)
@given(
    events=st.lists(events, max_size=40), ahead=st.integers(0, 1), k=st.sampled_from([None, 0, 2]),
    drafter=st.sampled_from([finished.name for finished in POOL]), seed=st.integers(0, 5),
)  # fmt: skip
def test_books_balance_whatever_comes_and_goes(
    events: list[tuple[int, int]], ahead: int, k: int | None, drafter: str, seed: int
) -> None:  # fmt: skip
    loop = control_loop(POOL, max_requests=RUNNING)
    loop.pin(k, drafter if k else None)
    seen: list[FinishedStep] = []
    loop.listeners.append(seen.append)
    engine = Engine(stepper(loop, block_ids=blocks), ahead, np.random.default_rng(seed))
    for event, number in events:
        if event == ADD:
            engine.add(number, 1 + number % 20)
        elif event == STEP:
            engine.step()
        elif event == LAND and engine.flights:
            engine.land()
        elif event == ABORT and engine.running:
            engine.abort(number)
        elif event == PREEMPT and engine.running:
            engine.preempt(number)
    while engine.running or engine.waiting:
        engine.step()
    while engine.flights:
        engine.land()
    state = loop.state()
    assert not any(finished.suspended for finished in state.drafters.values()), "the controller never raised"
    assert state.tally.steps == len(seen)
    assert state.tally.output_tokens == engine.delivered == sum(finished.outcome.tokens for finished in seen)
    for outcome in (finished.outcome for finished in seen):
        assert (outcome.accepted <= outcome.verified).all()
        assert len(set(outcome.batch.slot.tolist())) == len(outcome.batch)
        prompts = outcome.batch.prompt_left > 0
        assert (outcome.draft_plan.drafter_order[:, prompts] == NO_DRAFTER).all()
    assert loop.running == 0
    assert not engine.steps._records
    free = [engine.steps.requests.slots.take(f"new{number}") for number in range(2 * RUNNING)]
    assert len(set(free)) == 2 * RUNNING


def test_a_steps_time_is_its_own() -> None:
    """`t_out(n) - max(t_out(n-1), t_sched(n))`: neither the wait for a request nor the step before counts."""
    loop = control_loop((), max_requests=2)
    seen: list[FinishedStep] = []
    loop.listeners.append(seen.append)
    steps = stepper(loop, reports_drafting=False)
    steps.requests.arrived("a", 0.0, None, prompt=4, limit=20)
    ones = np.ones(1, np.int64)
    for scheduled_at, output_at in ((10.0, 10.03), (10.02, 10.05)):
        view = View(["a"], 4 * ones, 5 * ones, ones, ones)
        number, _ = steps.draft(view, ones, 0 * ones, Room(scheduled_at, 64, 64), steps.nothing_to_verify(1))
        steps.on_output(number, output_at=output_at, target_s=math.nan, tokens=1, verdicts=NOTHING_SCORED)
    assert [finished.outcome.step_s for finished in seen] == pytest.approx([0.03, 0.02])


def test_room_in_blocks_that_requests_hold_is_free() -> None:
    """If requests fill the memory, proposals fit into the rest of their last blocks."""
    assert room_in_blocks(np.array([5, 8]), 4) == 3


def test_profiler_verifies_placeholders_without_proposals() -> None:
    """Bug: a lookup that finds nothing in random prompts left every measured step a plain one."""
    loop = control_loop((lookup(),), max_requests=2)
    steps, ones = stepper(loop), np.ones(2, np.int64)
    view = View(["a", "b"], 4 * ones, 5 * ones, ones, ones)
    places = np.array([3, 0])
    assert steps.verify(view, places, Room(1.0, 64, 64)).lengths.tolist() == [0, 0]
    loop.profiled_placeholders = 3
    assert steps.verify(view, places, Room(1.0, 64, 64)).lengths.tolist() == [3, 0]


def test_draft_plan_uses_class_numbers_of_the_config_in_force() -> None:
    """Bug: the reporter's thread put other SLO classes in force between both decisions of a step. The draft plan then
    read a request's TPOT by its class's earlier number."""
    classes = [SLOClassSpec(name=name, tpot=tpot, ttft="1s") for name, tpot in (("loose", "80ms"), ("tight", "20ms"))]
    loop = control_loop((lookup(),), max_requests=1)
    loop.configure(hot_config().model_copy(update={"slo_classes": classes, "default_slo_class": "loose"}))
    steps, ones = stepper(loop), np.ones(1, np.int64)
    steps.requests.arrived("a", time.time(), None, prompt=4, limit=40)
    view, room = View(["a"], 4 * ones, 5 * ones, ones, ones), Room(1.0, 64, 64)
    plan = steps.verify(view, 0 * ones, room)
    loop.configure(hot_config().model_copy(update={"slo_classes": classes[::-1], "default_slo_class": "loose"}))
    number, _ = steps.draft(view, ones, 0 * ones, room, plan)
    assert steps._records[number].batch.slo_class.tolist() == [1]


def failed_last_step(*, reports_drafting: bool) -> tuple[Stepper, Any, list[FinishedStep], int]:
    loop = control_loop((eagle(),), max_requests=2)
    loop.pin(2, "eagle")
    seen: list[FinishedStep] = []
    loop.listeners.append(seen.append)
    steps = stepper(loop, reports_drafting=reports_drafting)
    steps.requests.arrived("a", 0.0, None, prompt=4, limit=40)
    ones = np.ones(1, np.int64)
    number, _ = steps.draft(
        View(["a"], 4 * ones, 5 * ones, ones, ones), ones, 0 * ones, Room(1.0, 64, 64), steps.nothing_to_verify(1)
    )  # fmt: skip
    steps.on_output(number, output_at=1.1, target_s=0.05, tokens=1, verdicts=NOTHING_SCORED)
    return steps, loop, seen, number


def test_an_engine_whose_requests_have_left_runs_none() -> None:
    """Bug: `outrider_requests_running` stayed at what the last step had."""
    steps, loop, _, _ = failed_last_step(reports_drafting=True)
    assert choice(loop, loop.state()).running == 1
    steps.leaves("a")
    assert choice(loop, loop.state()).running == 0


def test_draft_failure_in_a_bursts_last_step_suspends_later() -> None:
    """The step counts once, at once; its failure counts when the worker reports it."""
    steps, loop, seen, number = failed_last_step(reports_drafting=True)
    assert len(seen) == 1
    nothing = np.zeros(1, np.int8)
    steps.on_draft_reports(
        [DraftReport(number, np.array([math.nan]), nothing, nothing - 1, failures={0: "RuntimeError: broken"})]
    )
    assert "RuntimeError: broken" in loop.state().drafters["eagle"].suspended
    assert len(seen) == 1
    assert not steps._awaiting_report


def test_worker_that_reports_no_drafting_is_not_waited_for() -> None:
    steps, _, seen, _ = failed_last_step(reports_drafting=False)
    assert len(seen) == 1
    assert not steps._awaiting_report


def test_confidence_that_is_reported_in_time_is_used_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's report comes before the next decision in synchronous scheduling."""
    loop = control_loop((lookup(), eagle()), max_requests=3)
    loop.pin(2, "pld")
    steps, ones = stepper(loop), np.ones(3, np.int64)
    view = View(["a", "b", "c"], 4 * ones, 5 * ones, ones, ones)
    for name in view.names:
        steps.requests.arrived(name, 0.0, None, prompt=4, limit=40)
    number, _ = steps.draft(view, ones, 0 * ones, Room(1.0, 64, 64), steps.nothing_to_verify(3))
    steps.on_draft_reports(
        [
            DraftReport(
                number,
                np.zeros(2),
                numbers([2, 1, 1]),
                numbers([0, 0, 1]),
                confidence=numbers([[32, 32], [16, -128], [12, -128]]),
            )
        ]
    )
    seen: list[Forest] = []
    decide = loop.plan_verify

    def noted(batch: Batch, forest: Forest) -> VerifyPlan:
        seen.append(forest)
        return decide(batch, forest)

    monkeypatch.setattr(loop, "plan_verify", noted)
    steps.verify(view, np.array([2, 1, 1]), Room(1.1, 64, 64))
    assert seen[0].confidence.tolist() == pytest.approx([4, 4, 2, 1.5])
