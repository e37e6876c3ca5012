"""Scheduler and KV pool, without torch: accounts balance through all arrivals and aborts, and every request ends."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from outrider_runtime.torch_engine.batch_scheduler import TARGET, BatchScheduler, SchedulerLimits
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.kv_pool import FIRST_TOKENS, Holder, KVPool
from outrider_runtime.torch_engine.tree import Tree, chain, merge

LONGEST = 300
BYTES = (10, 4, 0, 1)
"""A token's KV in the target and in three drafters; the second has none."""


class Silent:
    def step(self, _token: int) -> str:
        return ""


def make_request(number: int, prompt: int, most: int, tpot_s: float = 0.0, due_at: float = 0.0) -> Request:
    stops = Stops(min(most, LONGEST - prompt))
    return Request(f"r{number}", [1] * prompt, prompt, stops, Sampling(), Silent(), due_at, tpot_s)


class SchedulerMachine(RuleBasedStateMachine):
    """An engine's steps with random answers. `buffers`: tokens that each buffer of a real engine would hold."""

    requests = 0
    """Requests of all runs."""

    @initialize(room=st.integers(LONGEST, 6 * LONGEST), tokens=st.integers(1, 200), most=st.integers(1, 6))
    def begin(self, room: int, tokens: int, most: int) -> None:
        self.pool = KVPool(room * BYTES[TARGET], BYTES, LONGEST)
        self.scheduler = BatchScheduler(self.pool, SchedulerLimits(most, tokens))
        self.scheduler.on_preempt = lambda request: self.forget(request.name)
        self.pool.on_drop = self.dropped
        self.buffers: dict[Holder, int] = {}
        self.unfinished: dict[str, Request] = {}
        self.count = 0

    def dropped(self, holder: Holder) -> None:
        self.buffers.pop(holder, None)

    def forget(self, name: str) -> None:
        for model in range(len(BYTES)):
            self.buffers.pop(Holder(model, name), None)

    @rule(
        several=st.integers(20, 60), prompt=st.integers(1, LONGEST - 1), most=st.integers(1, 30),
        draws=st.randoms(use_true_random=False),
    )  # fmt: skip
    def arrive(self, several: int, prompt: int, most: int, draws: Any) -> None:
        """Add requests: the first with a prompt of that length, most of the others with shorter ones."""
        for number in range(several):
            length = max(1, int(prompt * draws.random() ** 3)) if number else prompt
            tpot_s = draws.choice([0.1, 1.0, float("inf")])
            request = make_request(self.count, length, draws.randint(1, most), tpot_s, draws.uniform(0, 10))
            self.count += 1
            self.unfinished[request.name] = request
            self.scheduler.add(request)
        SchedulerMachine.requests += several

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        self.end(self.unfinished[data.draw(st.sampled_from(sorted(self.unfinished)))])

    def end(self, request: Request) -> None:
        del self.unfinished[request.name]
        self.scheduler.finish(request)
        self.forget(request.name)

    @rule(
        draws=st.randoms(use_true_random=False), budget=st.none() | st.integers(1, 50),
        admit=st.none() | st.integers(0, 2), several=st.integers(1, 30),
    )  # fmt: skip
    def steps(self, draws: Any, budget: int | None, admit: int | None, several: int) -> None:
        for _ in range(several):
            self.step(draws, budget, admit)
            self.accounts_balance()

    def step(self, draws: Any, budget: int | None, admit: int | None) -> None:
        was_running = [request.name for request in self.scheduler.running]
        step = self.scheduler.schedule(token_budget=budget, admit=admit)
        limits = self.scheduler.limits
        assert sum(request.tokens for request in step) <= min(limits.tokens, budget or limits.tokens)
        assert len(self.scheduler.running) <= limits.requests
        started = [request for request in self.scheduler.running if request.name not in was_running]
        assert admit is None or len(started) <= admit
        for request, tokens, proposals in step:
            assert request in self.scheduler.running
            assert 0 < tokens <= request.todo + proposals
            assert len(request.chosen) == proposals
            self.buffers[Holder(TARGET, request.name)] = request.computed + tokens
            self.run(request, tokens, proposals, draws)
        self.scheduler.idle_models = draws.sample([1, 2, 3], draws.randint(0, 3))
        self.scheduler.active_models = [request for request in (1, 2, 3) if request not in self.scheduler.idle_models]

    def run(self, request: Request, tokens: int, proposals: int, draws: Any) -> None:
        kept, is_prefilled = draws.randint(0, proposals), tokens - proposals == request.todo
        request.computed += tokens - proposals + kept
        request.proposals, request.chosen = Tree(), []
        if not is_prefilled:
            return
        request.tokens += [1] * (kept + 1)
        if request.emitted >= request.stops.max_tokens:
            self.end(request)
            return
        left = min(request.stops.max_tokens - request.emitted, LONGEST - len(request.tokens)) - 1
        request.proposals = chain([2] * draws.randint(0, min(4, left)), 0, 0.0)
        request.chosen = range(len(request.proposals))
        for model in (1, 3):
            holder, tokens_wanted = Holder(model, request.name), request.computed + draws.randint(0, 4)
            if draws.random() < 0.5 and self.pool.grow_or_drop(holder, tokens_wanted):
                self.buffers[holder] = tokens_wanted

    @invariant()
    def accounts_balance(self) -> None:
        pool = self.pool
        used = sum(pool.tokens(request) * BYTES[request.model] for request in pool.holders)
        assert pool.free_bytes == pool.total_bytes - used >= 0
        assert all(pool.tokens(holder) >= tokens for holder, tokens in self.buffers.items())
        assert {request.request for request in pool.holders} <= {request.name for request in self.scheduler.running}
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(request.name for request in queued) == sorted(self.unfinished)
        assert all(request.computed == 0 for request in self.scheduler.waiting)

    def teardown(self) -> None:
        """Run the remaining requests to their end: none waits for ever."""
        if not hasattr(self, "unfinished"):
            return
        for _ in range(200 * (1 + len(self.unfinished))):
            if not self.unfinished:
                break
            for request, tokens, proposals in self.scheduler.schedule():
                request.computed += tokens - proposals
                request.proposals, request.chosen = Tree(), []
                if not request.todo:
                    request.tokens.append(1)
                    if request.emitted >= request.stops.max_tokens:
                        self.end(request)
        assert not self.unfinished
        assert self.pool.free_bytes == self.pool.total_bytes


@pytest.mark.slow
def test_scheduler_invariants_hold_for_10000_requests() -> None:
    SchedulerMachine.requests = 0
    while SchedulerMachine.requests < 10_000:
        run_state_machine_as_test(
            SchedulerMachine, settings=settings(max_examples=20, stateful_step_count=40, deadline=None)
        )


def test_request_of_loosest_class_is_preempted_first() -> None:
    """Memory is freed in the order: idle drafters' KV, active drafters', the newest request of the loosest class."""
    pool = KVPool(450 * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    freed: list[Any] = []
    pool.on_drop = freed.append
    scheduler.on_preempt = lambda request: freed.append(request.name)
    tight, loose, newer = make_request(0, 64, 99, 0.1), make_request(1, 64, 99, 1.0), make_request(2, 64, 99, 1.0)
    for request in (tight, loose, newer):
        scheduler.add(request)
    for scheduled in scheduler.schedule():
        request = scheduled.request
        request.computed = 64
        request.tokens.append(1)
    assert pool.grow(Holder(1, loose.name), 64)
    assert pool.grow(Holder(3, tight.name), 64)
    scheduler.idle_models, scheduler.active_models = [3], [1]
    assert len(scheduler.schedule()) == 3
    assert not freed
    loose.tokens += [1] * 200
    scheduler.schedule()
    assert freed == [Holder(3, tight.name), Holder(1, loose.name), newer.name]
    assert newer.computed == 0
    assert scheduler.waiting[0] is newer


def test_proposals_are_cut_before_a_preemption() -> None:
    """Bug: when a request's tree did not fit into memory, the request itself was preempted for it, again and again."""
    pool = KVPool(LONGEST * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    only_request = make_request(0, LONGEST - 5, 5)
    scheduler.add(only_request)
    scheduler.schedule()
    only_request.computed = len(only_request.tokens)
    only_request.tokens.append(1)
    only_request.proposals = merge([chain([token], 1, 0.0) for token in range(20)])
    only_request.chosen = range(20)
    assert pool.grow(Holder(1, only_request.name), 1) is False
    assert [(made.tokens, made.proposals) for made in scheduler.schedule()] == [(5, 4)]
    assert not only_request.was_preempted


def decoding(number: int, read: int, proposals: int) -> Request:
    """Make a request that decodes: its last token is not computed yet."""
    decoding_request = make_request(number, read, 99)
    decoding_request.computed = read
    decoding_request.tokens.append(1)
    decoding_request.proposals = chain([2] * proposals, 1, 0.0)
    decoding_request.chosen = range(proposals)
    return decoding_request


def test_request_is_not_preempted_for_others_proposals() -> None:
    """Bug: a request that needed one token was preempted for another's sixteen proposals. Now as many proposals are
    verified as fit."""
    pool = KVPool(144 * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    scheduler.running = [decoding(0, 63, 16), decoding(1, 64, 0)]
    assert all(pool.grow(Holder(TARGET, scheduled.name), 64) for scheduled in scheduler.running)
    step = scheduler.schedule()
    assert [(scheduled.request.name, scheduled.tokens, scheduled.proposals) for scheduled in step] == [
        ("r0", 16, 15),
        ("r1", 1, 0),
    ]
    assert pool.free_bytes == 0


def test_drafter_kv_is_not_freed_for_proposals() -> None:
    """Bug: all drafters' KV was freed before a single proposal was cut."""
    pool = KVPool(144 * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    scheduler.running, scheduler.active_models = [decoding(0, 120, 30)], [1]
    assert pool.grow(Holder(TARGET, "r0"), 120)
    assert pool.grow(Holder(1, "r0"), 35)
    assert [(scheduled.tokens, scheduled.proposals) for scheduled in scheduler.schedule()] == [(10, 9)]
    assert pool.tokens(Holder(1, "r0")) == 35


def test_drafter_kv_is_not_freed_for_request_that_cannot_fit() -> None:
    """Bug: while a request waited for memory, each step freed all drafters' KV, and draft models computed it again."""
    pool = KVPool(300 * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    scheduler.running, scheduler.active_models = [decoding(0, 60, 0)], [1]
    assert pool.grow(Holder(TARGET, "r0"), 64)
    assert pool.grow(Holder(1, "r0"), 60)
    scheduler.add(make_request(1, 280, 10))
    assert [scheduled.request.name for scheduled in scheduler.schedule()] == ["r0"]
    assert pool.tokens(Holder(1, "r0")) == FIRST_TOKENS
    scheduler.add(make_request(2, 220, 10, due_at=-1.0))
    assert [scheduled.request.name for scheduled in scheduler.schedule()] == ["r0", "r2"]
    assert pool.tokens(Holder(1, "r0")) == 0, "the drafter's KV makes room for this request"


def test_buffer_that_cannot_double_grows_by_steps() -> None:
    """Bug: when there was no memory to double a buffer, it grew by one token a step and was copied each time."""
    pool, holder = KVPool(1000, [1]), Holder(TARGET, "r")
    assert pool.grow(holder, 513)
    assert pool.free_tokens(TARGET) == 1000 - 513 - FIRST_TOKENS
    assert pool.grow(holder, 600)
    assert pool.tokens(holder) == 600 + FIRST_TOKENS
    assert pool.grow(holder, 999)
    assert not pool.grow(holder, 1001)


def test_scheduler_does_not_import_torch() -> None:
    """Scheduling decisions are pure: their modules can be imported without torch."""
    modules = "commit, kv_pool, engine_request, batch_scheduler, tree"
    code = f"from outrider_runtime.torch_engine import {modules}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
