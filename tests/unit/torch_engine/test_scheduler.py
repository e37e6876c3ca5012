"""Scheduler and KV pool without torch: whatever comes and goes, the books balance, and everybody gets an end."""

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
from outrider_runtime.torch_engine.tree import Tree, chain, merged

LONGEST = 300
BYTES = (10, 4, 0, 1)
"""A token's KV in the target and in three drafters; the second has none."""


class Silent:
    def step(self, _token: int) -> str:
        return ""


def request(number: int, prompt: int, most: int, tpot_s: float = 0.0, due_at: float = 0.0) -> Request:
    stops = Stops(min(most, LONGEST - prompt))
    return Request(f"r{number}", [1] * prompt, prompt, stops, Sampling(), Silent(), due_at, tpot_s)


class Books(RuleBasedStateMachine):
    """An engine's steps with random answers; `held`: what an engine's buffers would hold."""

    requests = 0
    """Of all runs."""

    @initialize(room=st.integers(LONGEST, 6 * LONGEST), tokens=st.integers(1, 200), most=st.integers(1, 6))
    def begin(self, room: int, tokens: int, most: int) -> None:
        self.pool = KVPool(room * BYTES[TARGET], BYTES, LONGEST)
        self.scheduler = BatchScheduler(self.pool, SchedulerLimits(most, tokens))
        self.scheduler.on_preempt = lambda one: self.forget(one.name)
        self.pool.on_drop = self.dropped
        self.held: dict[Holder, int] = {}
        self.there: dict[str, Request] = {}
        self.count = 0

    def dropped(self, holder: Holder) -> None:
        self.held.pop(holder, None)

    def forget(self, name: str) -> None:
        for model in range(len(BYTES)):
            self.held.pop(Holder(model, name), None)

    @rule(
        several=st.integers(20, 60), prompt=st.integers(1, LONGEST - 1), most=st.integers(1, 30),
        draws=st.randoms(use_true_random=False),
    )  # fmt: skip
    def arrive(self, several: int, prompt: int, most: int, draws: Any) -> None:
        """The first with a prompt of that length, most of the others with shorter ones."""
        for number in range(several):
            length = max(1, int(prompt * draws.random() ** 3)) if number else prompt
            tpot_s = draws.choice([0.1, 1.0, float("inf")])
            one = request(self.count, length, draws.randint(1, most), tpot_s, draws.uniform(0, 10))
            self.count += 1
            self.there[one.name] = one
            self.scheduler.add(one)
        Books.requests += several

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        self.end(self.there[data.draw(st.sampled_from(sorted(self.there)))])

    def end(self, one: Request) -> None:
        del self.there[one.name]
        self.scheduler.finish(one)
        self.forget(one.name)

    @rule(
        draws=st.randoms(use_true_random=False), budget=st.none() | st.integers(1, 50),
        admit=st.none() | st.integers(0, 2), several=st.integers(1, 30),
    )  # fmt: skip
    def steps(self, draws: Any, budget: int | None, admit: int | None, several: int) -> None:
        for _ in range(several):
            self.step(draws, budget, admit)
            self.the_books_balance()

    def step(self, draws: Any, budget: int | None, admit: int | None) -> None:
        was_running = [one.name for one in self.scheduler.running]
        step = self.scheduler.schedule(token_budget=budget, admit=admit)
        limits = self.scheduler.limits
        assert sum(one.tokens for one in step) <= min(limits.tokens, budget or limits.tokens)
        assert len(self.scheduler.running) <= limits.requests
        started = [one for one in self.scheduler.running if one.name not in was_running]
        assert admit is None or len(started) <= admit
        for one, tokens, proposals in step:
            assert one in self.scheduler.running
            assert 0 < tokens <= one.todo + proposals
            assert len(one.chosen) == proposals
            self.held[Holder(TARGET, one.name)] = one.computed + tokens
            self.run(one, tokens, proposals, draws)
        self.scheduler.idle_models = draws.sample([1, 2, 3], draws.randint(0, 3))
        self.scheduler.active_models = [one for one in (1, 2, 3) if one not in self.scheduler.idle_models]

    def run(self, one: Request, tokens: int, proposals: int, draws: Any) -> None:
        kept, is_read = draws.randint(0, proposals), tokens - proposals == one.todo
        one.computed += tokens - proposals + kept
        one.proposals, one.chosen = Tree(), []
        if not is_read:
            return
        one.tokens += [1] * (kept + 1)
        if one.emitted >= one.stops.max_tokens:
            self.end(one)
            return
        left = min(one.stops.max_tokens - one.emitted, LONGEST - len(one.tokens)) - 1
        one.proposals = chain([2] * draws.randint(0, min(4, left)), 0, 0.0)
        one.chosen = range(len(one.proposals))
        for model in (1, 3):
            holder, wanted = Holder(model, one.name), one.computed + draws.randint(0, 4)
            if draws.random() < 0.5 and self.pool.grow_or_drop(holder, wanted):
                self.held[holder] = wanted

    @invariant()
    def the_books_balance(self) -> None:
        pool = self.pool
        used = sum(pool.tokens(one) * BYTES[one.model] for one in pool.holders)
        assert pool.free_bytes == pool.total_bytes - used >= 0
        assert all(pool.tokens(holder) >= tokens for holder, tokens in self.held.items())
        assert {one.request for one in pool.holders} <= {one.name for one in self.scheduler.running}
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(one.name for one in queued) == sorted(self.there)
        assert all(one.computed == 0 for one in self.scheduler.waiting)

    def teardown(self) -> None:
        """Whoever is left comes to an end: nobody waits for ever."""
        if not hasattr(self, "there"):
            return
        for _ in range(200 * (1 + len(self.there))):
            if not self.there:
                break
            for one, tokens, proposals in self.scheduler.schedule():
                one.computed += tokens - proposals
                one.proposals, one.chosen = Tree(), []
                if not one.todo:
                    one.tokens.append(1)
                    if one.emitted >= one.stops.max_tokens:
                        self.end(one)
        assert not self.there
        assert self.pool.free_bytes == self.pool.total_bytes


@pytest.mark.slow
def test_ten_thousand_requests_come_and_go() -> None:
    Books.requests = 0
    while Books.requests < 10_000:
        run_state_machine_as_test(Books, settings=settings(max_examples=20, stateful_step_count=40, deadline=None))


def test_who_bears_slow_tokens_makes_room_first() -> None:
    """Idle drafters' KV, then active drafters', then the newest request of the loosest class."""
    pool = KVPool(450 * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    gone: list[Any] = []
    pool.on_drop = gone.append
    scheduler.on_preempt = lambda one: gone.append(one.name)
    tight, loose, newer = request(0, 64, 99, 0.1), request(1, 64, 99, 1.0), request(2, 64, 99, 1.0)
    for one in (tight, loose, newer):
        scheduler.add(one)
    for scheduled in scheduler.schedule():
        one = scheduled.request
        one.computed = 64
        one.tokens.append(1)
    assert pool.grow(Holder(1, loose.name), 64)
    assert pool.grow(Holder(3, tight.name), 64)
    scheduler.idle_models, scheduler.active_models = [3], [1]
    assert len(scheduler.schedule()) == 3
    assert not gone
    loose.tokens += [1] * 200
    scheduler.schedule()
    assert gone == [Holder(3, tight.name), Holder(1, loose.name), newer.name]
    assert newer.computed == 0
    assert scheduler.waiting[0] is newer


def test_proposals_are_given_up_before_anybody_is_preempted() -> None:
    """Bug: where a tree beside its request's last tokens found no room, the request itself was preempted for it, again
    and again."""
    pool = KVPool(LONGEST * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    one = request(0, LONGEST - 5, 5)
    scheduler.add(one)
    scheduler.schedule()
    one.computed = len(one.tokens)
    one.tokens.append(1)
    one.proposals = merged([chain([token], 1, 0.0) for token in range(20)])
    one.chosen = range(20)
    assert pool.grow(Holder(1, one.name), 1) is False
    assert [(made.tokens, made.proposals) for made in scheduler.schedule()] == [(5, 4)]
    assert not one.was_preempted


def decoding(number: int, read: int, proposals: int) -> Request:
    """One token is not computed."""
    one = request(number, read, 99)
    one.computed = read
    one.tokens.append(1)
    one.proposals = chain([2] * proposals, 1, 0.0)
    one.chosen = range(proposals)
    return one


def test_nobody_is_preempted_for_anothers_proposals() -> None:
    """Bug: the second of two requests, which needed one token, was preempted for the first one's sixteen proposals.
    As many of them are verified as find room."""
    pool = KVPool(144 * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    scheduler.running = [decoding(0, 63, 16), decoding(1, 64, 0)]
    assert all(pool.grow(Holder(TARGET, one.name), 64) for one in scheduler.running)
    step = scheduler.schedule()
    assert [(one.request.name, one.tokens, one.proposals) for one in step] == [("r0", 16, 15), ("r1", 1, 0)]
    assert pool.free_bytes == 0


def test_no_drafter_loses_its_kv_for_proposals() -> None:
    """Bug: all that drafters had cached went before one proposal was left out."""
    pool = KVPool(144 * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    scheduler.running, scheduler.active_models = [decoding(0, 120, 30)], [1]
    assert pool.grow(Holder(TARGET, "r0"), 120)
    assert pool.grow(Holder(1, "r0"), 35)
    assert [(one.tokens, one.proposals) for one in scheduler.schedule()] == [(10, 9)]
    assert pool.tokens(Holder(1, "r0")) == 35


def test_no_drafter_loses_its_kv_for_a_newcomer_that_would_not_fit_either_way() -> None:
    """Bug: while somebody waited for memory, heads forgot everything at each step, and draft models read it again."""
    pool = KVPool(300 * BYTES[TARGET], BYTES, LONGEST)
    scheduler = BatchScheduler(pool, SchedulerLimits(4, 500))
    scheduler.running, scheduler.active_models = [decoding(0, 60, 0)], [1]
    assert pool.grow(Holder(TARGET, "r0"), 64)
    assert pool.grow(Holder(1, "r0"), 60)
    scheduler.add(request(1, 280, 10))
    assert [one.request.name for one in scheduler.schedule()] == ["r0"]
    assert pool.tokens(Holder(1, "r0")) == FIRST_TOKENS
    scheduler.add(request(2, 220, 10, due_at=-1.0))
    assert [one.request.name for one in scheduler.schedule()] == ["r0", "r2"]
    assert pool.tokens(Holder(1, "r0")) == 0, "this one finds its room there"


def test_a_buffer_that_cannot_double_is_not_copied_at_every_token() -> None:
    """Bug: once memory was short for twice a buffer, it grew by a token a step, and all of it was copied each time."""
    pool, holder = KVPool(1000, [1]), Holder(TARGET, "r")
    assert pool.grow(holder, 513)
    assert pool.free_tokens(TARGET) == 1000 - 513 - FIRST_TOKENS
    assert pool.grow(holder, 600)
    assert pool.tokens(holder) == 600 + FIRST_TOKENS
    assert pool.grow(holder, 999)
    assert not pool.grow(holder, 1001)


def test_it_knows_no_torch() -> None:
    """A process that decides who runs does not load it."""
    modules = "commit, kv_pool, engine_request, batch_scheduler, tree"
    code = f"from outrider_runtime.torch_engine import {modules}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
