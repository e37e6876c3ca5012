"""A simulated engine's step, as vLLM's: schedule, run, observe, propose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from outrider_runtime.control.batch import Batch, Bools, Floats, Waiting
from outrider_runtime.control.forest import Forest
from outrider_runtime.control.plans import DraftPlan, ExecutionMode, Outcome, Purpose, VerifyPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.caches import Caches
from outrider_runtime.simulate.replay.proposals import Proposals
from outrider_runtime.simulate.replay.requests import Books, Requests, Rows
from outrider_runtime.simulate.replay.scheduling import Limits, Scheduled, Scheduler
from outrider_runtime.simulate.replay.workload import Ints, Workload
from outrider_runtime.simulate.worlds.world import Pass, World

CATCH_UP_TOKENS = 16
"""A draft that is fed more of a decoding request than this attends as to a prompt."""


class Policy(Protocol):
    """What decides: `control.controller.Controller`, or anything with its calls."""

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
    patience_s: tuple[float, ...] = ()
    """How long a request of each SLO class may wait: those due first are let in first, and the policy is told of them.
    Empty: first come, first served."""


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
        self._caches = Caches(setting.drafters, len(load))
        self._proposals = Proposals(setting.recording, setting.drafters, self.requests)
        self._next = 0
        self._decision = tuple(zip(*setting.decision_us, strict=True))
        self._patience_s = np.array([*setting.patience_s, max(setting.patience_s, default=0.0)])
        """By class; the last one is that of requests without a class."""

    def run(self, until_s: float = np.inf) -> None:
        """Until every request is finished, or the clock says so."""
        while self.now < until_s and self.advance():
            pass

    def advance(self) -> bool:
        """One step, or the wait for the next request; False when there is nothing more to do."""
        self._arrive()
        if len(self._scheduler.running) or self._scheduler.waiting:
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
            patience_s = self._patience_s[load.slo_class[self._next]] if self.setting.patience_s else 0.0
            self.requests.due_s[self._next] = self.requests.arrived_s[self._next] + patience_s
            scheduler.wait(self._next)
            self._next += 1

    def step(self) -> None:
        running = self.requests.of(self._scheduler.running)
        forest = self._proposals.forest(running.rows)
        verify = self.policy.plan_verify(self._batch(running, None), forest)
        step = self._scheduler.schedule(running, verify.lengths, verify.token_budget, verify.admit)
        if len(step.preempted):
            self._forget(step.preempted)
        verified = np.zeros(len(self.requests.load), np.int64)
        verified[running.rows] = verify.lengths
        again = self._proposals.forest(step.rows) if step.paused else forest
        forest = self._proposals.with_newcomers(again, step.rows)
        self._run(step, forest, verified[step.rows], verify.purpose)

    def _batch(self, books: Books, tokens: Ints | None) -> Batch:
        """tokens (N,): of the step; None: it is not scheduled yet."""
        limits, scheduler = self.setting.limits, self._scheduler
        computed = np.minimum(books.todo, limits.token_budget) if tokens is None else tokens
        chunk = np.where(books.decodes, 0, computed)
        missing, read, whole = self._caches.columns(books, np.zeros_like(chunk) if tokens is None else tokens)
        return Batch(
            slot=books.slot,
            slo_class=books.slo_class,
            context=books.context,
            prompt=chunk,
            prompt_left=np.where(books.decodes, 0, books.todo - chunk),
            left=books.left,
            emitted=books.produced,
            elapsed_s=np.where(books.produced > 0, self.now - books.first_s, 0.0),
            missing=missing,
            read=read,
            whole=whole,
            now=self.now,
            token_budget=limits.token_budget,
            free_kv_tokens=scheduler.free_tokens(),
            next=self._waiting(),
            patience_used=self._patience_used(books) if self.setting.patience_s else 0.0,
            waiting=min(len(scheduler.waiting), limits.max_requests - len(scheduler.running)),
        )

    def _waiting(self) -> Waiting | None:
        if not self._scheduler.waiting:
            return None
        load, row = self.requests.load, self._scheduler.waiting[0]
        overdue = bool(self.setting.patience_s) and bool(self.now >= self.requests.due_s[row])
        return Waiting(int(load.slo_class[row]), int(load.prompt[row]), int(load.output[row]), overdue)

    def _patience_used(self, books: Books) -> float:
        """By those whose prompts are being read, and the one that waits in front; preempted ones do not count."""
        rows = books.rows[books.produced == 0]
        if self._scheduler.waiting:
            rows = np.append(rows, self._scheduler.waiting[0])
        due_s, arrived_s = self.requests.due_s[rows], self.requests.arrived_s[rows]
        used = (self.now - arrived_s) / (due_s - arrived_s)
        return float(used[np.isfinite(due_s)].max(initial=0.0))

    def _forget(self, preempted: Rows) -> None:
        self._caches.forget(preempted)
        self._proposals.clear(preempted)
        self.policy.release(self.requests.slot[preempted])

    def _run(self, step: Scheduled, forest: Forest, verified: Ints, purpose: Purpose) -> None:
        """verified (N,): proposals that the target scores."""
        books = self.requests.of(step.rows)
        batch = self._batch(books, step.tokens)
        plan = self.policy.plan_draft(batch)
        fed = _fed(plan, batch, self.setting.drafters)
        target = _target_pass(books, batch, step.tokens)
        target_s = self.setting.world.target_s(target)
        draft_s = self._draft_s(plan, books, fed)
        step_s = self._step_s(target_s + sum(draft_s.values()), len(books.rows))
        self.now += step_s
        accepted = np.where(books.decodes, self._proposals.accepted(books.rows, verified), 0)
        committed = step.tokens - verified + accepted
        self._caches.feed(books, fed, batch.prompt, committed)
        tokens = self._emit(books, batch, committed, accepted)
        self._note(step_s, tokens, len(books.rows), int(verified.sum()), int(accepted.sum()))
        depth = forest.depth
        outcome = Outcome(
            now=self.now, step_s=step_s, target_s=target_s, draft_s=self._each(draft_s),
            mode=_mode(target, self.setting.world.graph_tokens), tokens=tokens, batch=batch,
            draft_plan=plan, verify_purpose=purpose, forest=forest,
            verified=depth <= verified[forest.request], accepted=depth <= accepted[forest.request],
        )  # fmt: skip
        after = self.requests.of(step.rows)
        self._propose(after, plan)
        self.policy.observe(outcome)
        self._retire(after.rows[after.left <= 0])

    def _step_s(self, device_s: float, requests: int) -> float:
        at, us = self._decision
        decision_s = float(np.interp(requests, at, us)) / 1e6
        return max(device_s, decision_s) if self.setting.asynchronous else device_s + decision_s

    def _draft_s(self, plan: DraftPlan, books: Books, fed: Ints) -> dict[int, float]:
        """Seconds of each drafter that ran, by number."""
        seconds = {}
        for number, passes in enumerate(plan.passes.tolist()):
            asked = int(np.count_nonzero((plan.asked == number).any(0))) if passes else 0
            if asked or fed[number].any():
                drafter = self.setting.drafters[number]
                requests = int(np.count_nonzero(books.decodes)) if drafter.passes else asked
                one = _draft_pass(books, fed[number], requests)
                seconds[number] = self.setting.world.draft_s(drafter.name, one, passes)
        return seconds

    def _each(self, draft_s: dict[int, float]) -> Floats:
        """(D,); NaN: it did not run."""
        return np.array([draft_s.get(number, np.nan) for number in range(len(self.setting.drafters))])

    def _emit(self, books: Books, batch: Batch, committed: Ints, accepted: Ints) -> int:
        """Advance the books; returns the tokens that reached users."""
        requests, rows = self.requests, books.rows
        requests.context[rows] = books.context + committed
        yields = books.decodes | (batch.prompt_left == 0)
        requests.first_s[rows[yields & (books.produced == 0)]] = self.now
        tokens = np.where(yields, np.minimum(1 + accepted, books.left), 0)
        requests.produced[rows] = books.produced + tokens
        return int(tokens.sum())

    def _propose(self, books: Books, plan: DraftPlan) -> None:
        """The books are from after the step."""
        self._proposals.propose(books, plan, *self._caches.columns(books, np.zeros_like(books.rows)))

    def _note(self, step_s: float, tokens: int, requests: int, verified: int, accepted: int) -> None:
        log = self.log
        log.now.append(self.now)
        log.step_s.append(step_s)
        log.tokens.append(tokens)
        log.requests.append(requests)
        log.verified.append(verified)
        log.accepted.append(accepted)

    def _retire(self, done: Rows) -> None:
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


def _target_pass(books: Books, batch: Batch, tokens: Ints) -> Pass:
    decodes = books.decodes
    requests, context = _decoding(books)
    if requests == len(tokens):
        batched = int(tokens.sum())
        return Pass(batched, requests, context, batched, (), bool(tokens.min() == tokens.max()))
    prompts, decoding = (~decodes).nonzero()[0], tokens[decodes]
    logits = int(decoding.sum()) + int(np.count_nonzero(batch.prompt_left[prompts] == 0))
    chunks = list(zip(tokens[prompts].tolist(), books.context[prompts].tolist(), strict=True))
    even = requests == 0 or bool(decoding.min() == decoding.max())
    return Pass(int(tokens.sum()), requests, context, logits, chunks, even)


def _draft_pass(books: Books, fed: Ints, asked: int) -> Pass:
    """The first pass: over `fed` (N,); attention as to a prompt where that is more than a step's tokens."""
    long = ((fed > 0) & (~books.decodes | (fed > CATCH_UP_TOKENS))).nonzero()[0]
    prefix = np.maximum(0, books.context[long] - fed[long])
    chunks = list(zip(fed[long].tolist(), prefix.tolist(), strict=True))
    return Pass(max(int(fed.sum()), asked), asked, _decoding(books)[1], max(asked, 1), chunks)


def _decoding(books: Books) -> tuple[int, float]:
    """Requests that decode, and their mean context."""
    requests = int(np.count_nonzero(books.decodes))
    return requests, float((books.context * books.decodes).sum()) / requests if requests else 0.0


def _mode(one: Pass, graph_tokens: int | None) -> ExecutionMode:
    if graph_tokens is not None and one.tokens > graph_tokens:
        return ExecutionMode.BEYOND_GRAPH
    return ExecutionMode.UNIFORM if one.even and not one.prompts else ExecutionMode.RAGGED
