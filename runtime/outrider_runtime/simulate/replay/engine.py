"""A simulated engine's step, as vLLM's: schedule, run, observe, propose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from outrider_runtime.core.batch import Batch, Bools, Floats, Waiting
from outrider_runtime.core.forest import Forest
from outrider_runtime.core.plans import DraftPlan, ExecutionMode, Outcome, VerifyPlan
from outrider_runtime.core.settings import Drafter
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.caches import Caches
from outrider_runtime.simulate.replay.proposals import Proposals
from outrider_runtime.simulate.replay.requests import Requests, Rows
from outrider_runtime.simulate.replay.scheduling import Limits, Scheduled, Scheduler
from outrider_runtime.simulate.replay.workload import Ints, Workload
from outrider_runtime.simulate.worlds.world import Pass, World

CATCH_UP_TOKENS = 16
"""A draft that is fed more of a decoding request than this attends as to a prompt."""


class Policy(Protocol):
    """What decides: `core.controller.Controller`, or anything with its calls."""

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan: ...
    def plan_draft(self, batch: Batch) -> DraftPlan: ...
    def observe(self, outcome: Outcome) -> None: ...
    def release(self, slots: Ints) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What a policy cannot change."""

    world: World
    recording: Recording
    drafters: tuple[Drafter, ...]
    """The pool, in its order; each a drafter of the world and of the recording."""
    limits: Limits
    decision_us: tuple[tuple[int, float], ...] = ((1, 0.0),)
    """What two decisions and an observation cost, by batch; straight between."""
    asynchronous: bool = True
    """The host decides while the device runs: only what takes longer than the step is seen."""

    def step_s(self, device_s: float, batch: int) -> float:
        at, us = zip(*self.decision_us, strict=True)
        decision_s = float(np.interp(batch, at, us)) / 1e6
        return max(device_s, decision_s) if self.asynchronous else device_s + decision_s


@dataclass(slots=True)
class Log:
    """A few numbers of each step."""

    now: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Engine:
    """One pod's engine under one policy."""

    def __init__(self, setting: Setting, load: Workload, policy: Policy) -> None:
        self.setting, self.policy = setting, policy
        self.requests = Requests(load)
        self.log = Log()
        self.now = 0.0
        self._scheduler = Scheduler(self.requests, setting.limits)
        self._caches = Caches(setting.drafters, self.requests)
        self._proposals = Proposals(setting.recording, setting.drafters, self.requests)
        self._next = 0
        self._done = 0
        self._finished: list[Rows] = []

    def run(self, until_s: float = np.inf) -> None:
        """Until every request is finished, or the clock says so."""
        while self.now < until_s and self.advance():
            pass

    def advance(self) -> bool:
        """One step, or the wait for the next request; False when there is nothing more to do."""
        self._arrive()
        if self._scheduler.running or self._scheduler.waiting:
            self.step()
            return True
        if self._next >= len(self.requests.load):
            return False
        self.now = max(self.now, float(self.requests.load.at_s[self._next]))
        return True

    def _arrive(self) -> None:
        load, scheduler = self.requests.load, self._scheduler
        while self._next < len(load) and load.at_s[self._next] <= self.now:
            if load.clients is not None:
                if len(scheduler.running) + len(scheduler.waiting) >= load.clients:
                    return
                self.requests.arrived_s[self._next] = self.now
            scheduler.waiting.append(self._next)
            self._next += 1

    def step(self) -> None:
        scheduler, proposals = self._scheduler, self._proposals
        rows = scheduler.rows()
        verify = self.policy.plan_verify(
            self._batch(rows, np.zeros(len(rows), np.int64), ahead=True), proposals.forest(rows)
        )
        before = set(scheduler.running)
        step = scheduler.schedule(verify.lengths, verify.token_budget, verify.admit)
        self._forget_preempted(before)
        verified = np.zeros(len(self.requests.load), np.int64)
        verified[rows] = verify.lengths
        batch = self._batch(step.rows, step.tokens, ahead=False)
        forest = proposals.forest(step.rows)
        plan = self.policy.plan_draft(batch)
        outcome = self._run(step, batch, forest, verified[step.rows], plan, verify)
        self.policy.observe(outcome)
        self._retire(step.rows)

    def _batch(self, rows: Rows, tokens: Ints, *, ahead: bool) -> Batch:
        """ahead: before the step is scheduled."""
        requests, limits = self.requests, self.setting.limits
        todo, decodes = requests.todo(rows), requests.decoding(rows)
        chunk = np.where(decodes, 0, np.minimum(todo, limits.token_budget) if ahead else tokens)
        return Batch(
            slot=requests.slot[rows],
            slo_class=requests.load.slo_class[rows],
            context=requests.context[rows],
            prompt=chunk,
            prompt_left=np.where(decodes, 0, todo - chunk),
            left=requests.left(rows),
            emitted=requests.produced[rows],
            elapsed_s=requests.elapsed_s(rows, self.now),
            missing=self._caches.missing(rows, tokens),
            read=self._caches.read(rows),
            whole=self._caches.whole(rows),
            now=self.now,
            token_budget=limits.token_budget,
            free_kv_tokens=self._scheduler.free_tokens(),
            next=self._waiting(),
            waiting=min(len(self._scheduler.waiting), limits.max_requests - len(self._scheduler.running)),
        )

    def _waiting(self) -> Waiting | None:
        if not self._scheduler.waiting:
            return None
        load, row = self.requests.load, self._scheduler.waiting[0]
        return Waiting(int(load.slo_class[row]), int(load.prompt[row]), int(load.output[row]))

    def _forget_preempted(self, before: set[int]) -> None:
        gone = np.array(sorted(before - set(self._scheduler.running)), np.int64)
        if len(gone):
            self._caches.forget(gone)
            self._proposals.clear(gone)
            self.policy.release(self.requests.slot[gone])

    def _run(
        self, step: Scheduled, batch: Batch, forest: Forest, verified: Ints, plan: DraftPlan, verify: VerifyPlan
    ) -> Outcome:
        rows, decodes = step.rows, batch.decodes
        fed = _fed(plan, batch, self.setting.drafters)
        target_s = self.setting.world.target_s(_target_pass(batch, step.tokens))
        draft_s = self._draft_s(plan, batch, fed)
        step_s = self.setting.step_s(target_s + float(np.nansum(draft_s)), len(rows))
        self.now += step_s
        accepted = np.where(decodes, self._proposals.accepted(rows, verified), 0)
        tokens = self._emit(step, batch, verified, accepted)
        self._caches.feed(rows, fed, batch.prompt, step.tokens - verified + accepted)
        self._propose(rows, plan)
        self._note(step_s, tokens, len(rows), int(verified.sum()), int(accepted.sum()))
        depth = forest.depth
        return Outcome(
            now=self.now, step_s=step_s, target_s=target_s, draft_s=draft_s,
            mode=_mode(batch, step.tokens, self.setting.world.graph_tokens), tokens=tokens, batch=batch,
            draft_plan=plan, verify_purpose=verify.purpose, forest=forest,
            verified=depth <= verified[forest.request], accepted=depth <= accepted[forest.request],
        )  # fmt: skip

    def _draft_s(self, plan: DraftPlan, batch: Batch, fed: Ints) -> Floats:
        """(D,) seconds of each drafter; NaN: it did not run."""
        seconds = np.full(len(self.setting.drafters), np.nan)
        for number, drafter in enumerate(self.setting.drafters):
            asked = int((plan.asked == number).any(0).sum()) if plan.passes[number] else 0
            if asked or fed[number].any():
                one = _draft_pass(batch, fed[number], asked if not drafter.passes else int(batch.decodes.sum()))
                seconds[number] = self.setting.world.draft_s(drafter.name, one, int(plan.passes[number]))
        return seconds

    def _emit(self, step: Scheduled, batch: Batch, verified: Ints, accepted: Ints) -> int:
        """Advance the books; returns the tokens that reached users."""
        requests, rows = self.requests, step.rows
        requests.context[rows] += step.tokens - verified + accepted
        yields = batch.decodes | (batch.prompt_left == 0)
        first = yields & (requests.produced[rows] == 0)
        requests.first_s[rows[first]] = self.now
        tokens = np.where(yields, np.minimum(1 + accepted, requests.left(rows)), 0)
        requests.produced[rows] += tokens
        return int(tokens.sum())

    def _propose(self, rows: Rows, plan: DraftPlan) -> None:
        decodes = self.requests.decoding(rows)
        self._proposals.clear(rows)
        rows = rows[decodes]
        missing = self._caches.missing(rows, np.zeros(len(rows), np.int64))
        own = DraftPlan(plan.passes, plan.asked[:, decodes], plan.feed[:, decodes], plan.purpose)
        self._proposals.propose(rows, own, missing, self._caches.read(rows), self._caches.whole(rows))

    def _note(self, step_s: float, tokens: int, requests: int, verified: int, accepted: int) -> None:
        log = self.log
        log.now.append(self.now)
        log.step_s.append(step_s)
        log.tokens.append(tokens)
        log.requests.append(requests)
        log.verified.append(verified)
        log.accepted.append(accepted)

    def _retire(self, rows: Rows) -> None:
        done = rows[self.requests.left(rows) <= 0]
        if len(done):
            self.requests.done_s[done] = self.now
            self.policy.release(self.requests.slot[done])
            self._scheduler.finish(done)


def _fed(plan: DraftPlan, batch: Batch, drafters: tuple[Drafter, ...]) -> Ints:
    """(D, N) tokens that each drafter runs over: what the plan says, and all that it misses of requests that ask it."""
    fed = np.minimum(plan.feed, batch.missing)
    for number, drafter in enumerate(drafters):
        if drafter.reads and plan.passes[number]:
            asks: Bools = (plan.asked == number).any(0)
            fed[number] = np.where(asks, batch.missing[number], fed[number])
    return np.asarray(fed)


def _target_pass(batch: Batch, tokens: Ints) -> Pass:
    decodes = batch.decodes
    requests, prompts = int(decodes.sum()), np.flatnonzero(~decodes)
    logits = int(tokens[decodes].sum()) + int((batch.prompt_left[prompts] == 0).sum())
    chunks = [(int(tokens[row]), int(batch.context[row])) for row in prompts]
    context = float(batch.context[decodes].mean()) if requests else 0.0
    even = requests == 0 or int(tokens[decodes].min()) == int(tokens[decodes].max())
    return Pass(int(tokens.sum()), requests, context, logits, chunks, even)


def _draft_pass(batch: Batch, fed: Ints, asked: int) -> Pass:
    """The first pass: over `fed` (N,); attention as to a prompt where that is more than a step's tokens."""
    long = (fed > 0) & (~batch.decodes | (fed > CATCH_UP_TOKENS))
    chunks = [(int(fed[row]), max(0, int(batch.context[row] - fed[row]))) for row in np.flatnonzero(long)]
    context = float(batch.context[batch.decodes].mean()) if batch.decodes.any() else 0.0
    return Pass(max(int(fed.sum()), asked), asked, context, max(asked, 1), chunks)


def _mode(batch: Batch, tokens: Ints, graph_tokens: int | None) -> ExecutionMode:
    if graph_tokens is not None and int(tokens.sum()) > graph_tokens:
        return ExecutionMode.BEYOND_GRAPH
    even = bool(batch.decodes.all()) and int(tokens.min()) == int(tokens.max())
    return ExecutionMode.UNIFORM if even else ExecutionMode.RAGGED
