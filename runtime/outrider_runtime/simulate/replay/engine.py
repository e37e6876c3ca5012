"""A simulated engine's step, as vLLM's: schedule, run, observe, propose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from outrider_runtime.control.data.batch import Batch, Bools, Waiting
from outrider_runtime.control.data.forest import ROOT, Forest, trials
from outrider_runtime.control.data.plans import DraftPlan, Outcome, Purpose, VerifyPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.device import Device
from outrider_runtime.simulate.replay.requests import Books, Requests, Rows
from outrider_runtime.simulate.replay.scheduling import Limits, Scheduled, Scheduler
from outrider_runtime.simulate.replay.workload import Ints, Workload
from outrider_runtime.simulate.worlds.world import World


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
    confidences: bool = True
    """How sure the drafters are of their proposals reaches the policy. It does not reach the loop in vLLM."""
    bundled: bool = False
    """The bundled engine: it knows its proposals, so what the target draws behind an accepted node tells of those, too,
    that it did not score."""


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
        self._device = Device(setting.world, setting.recording, setting.drafters, self.requests)
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
        forest = self._forest(running.rows)
        verify = self.policy.plan_verify(self._batch(running, None), forest)
        step = self._scheduler.schedule(running, verify.lengths, verify.token_budget, verify.admit)
        if len(step.preempted):
            self._forget(step.preempted)
        nodes = verify.nodes
        if step.paused:
            nodes = nodes[np.isin(running.rows, step.rows)[forest.request]]
            forest = self._forest(step.rows)
        forest = self._device.proposals.with_newcomers(forest, step.rows)
        self._run(step, forest, nodes, verify.purpose)

    def _forest(self, rows: Rows) -> Forest:
        return self._device.proposals.forest(rows, confidences=self.setting.confidences)

    def _batch(self, books: Books, tokens: Ints | None) -> Batch:
        """tokens (N,): of the step; None: it is not scheduled yet."""
        limits, scheduler = self.setting.limits, self._scheduler
        computed = np.minimum(books.todo, limits.token_budget) if tokens is None else tokens
        chunk = np.where(books.decodes, 0, computed)
        if tokens is None:  # nobody looks at it before the step
            missing = np.zeros((len(self.setting.drafters), len(chunk)), np.int64)
        else:
            missing, _, _ = self._device.caches.columns(books, tokens)
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
        self._device.forget(preempted)
        self.policy.release(self.requests.slot[preempted])

    def _run(self, step: Scheduled, forest: Forest, nodes: Bools, purpose: Purpose) -> None:
        """nodes (M,): proposals that the target scores."""
        books = self.requests.of(step.rows)
        batch = self._batch(books, step.tokens)
        plan = self.policy.plan_draft(batch)
        right = self._device.proposals.right(forest, step.rows)
        verified = np.bincount(forest.request[nodes], minlength=len(step.rows))
        accepted = np.bincount(forest.request[nodes & right], minlength=len(step.rows))
        fed = _fed(plan, batch, self.setting.drafters)
        ran = self._device.run(books, step.tokens, verified, accepted, plan, fed)
        step_s = self._step_s(ran.seconds, len(books.rows))
        self.now += step_s
        self.requests.first_s[books.rows[(ran.tokens > 0) & (books.produced == 0)]] = self.now
        tokens = int(ran.tokens.sum())
        self._note(step_s, tokens, len(books.rows), int(verified.sum()), int(ran.accepted.sum()))
        kept, tried = self._verdicts(forest, nodes, right)
        outcome = Outcome(
            now=self.now, step_s=step_s, target_s=ran.target_s, draft_s=ran.each_draft_s(len(self.setting.drafters)),
            mode=ran.mode, tokens=tokens, batch=batch, draft_plan=plan, verify_purpose=purpose, forest=forest,
            verified=nodes, accepted=kept, tried=tried,
        )  # fmt: skip
        self.policy.observe(outcome)
        self._retire(books.rows[books.left <= ran.tokens])

    def _verdicts(self, forest: Forest, nodes: Bools, right: Bools) -> tuple[Bools, Bools]:
        """(M,) nodes that were accepted, and that were tried, as `Outcome` has them."""
        held = nodes & right
        if not self.setting.bundled:
            return held, trials(forest, nodes, held)
        tried = (forest.parent == ROOT) | held[forest.parent]
        return right & tried, tried

    def _step_s(self, device_s: float, requests: int) -> float:
        at, us = self._decision
        decision_s = float(np.interp(requests, at, us)) / 1e6
        return max(device_s, decision_s) if self.setting.asynchronous else device_s + decision_s

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
