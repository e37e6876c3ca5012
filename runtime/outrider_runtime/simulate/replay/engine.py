"""A simulated engine with the steps of vLLM: schedule, run, propose, observe."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from outrider_runtime.control.batch import Batch, Bools, Waiting
from outrider_runtime.control.pending_proposals import PendingProposals, no_proposals
from outrider_runtime.control.plans import ROOT, DeviceOrder, DraftPlan, Forest, Nodes, Outcome, Purpose, VerifyPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.confidences import Calibrator, confidences
from outrider_runtime.loop.coverage import ScheduledStep
from outrider_runtime.loop.steps import NodeVerdicts, Record, TargetResult
from outrider_runtime.simulate.recording import DEPTH, Recording
from outrider_runtime.simulate.replay.device import Device, DeviceStep
from outrider_runtime.simulate.replay.flights import DraftingReport, Flight
from outrider_runtime.simulate.replay.ranked_proposals import RankedProposals
from outrider_runtime.simulate.replay.replay_requests import ReplayRequests, RequestStates, Rows
from outrider_runtime.simulate.replay.step_scheduler import Limits, Scheduled, Scheduler
from outrider_runtime.simulate.replay.workload import Floats, Ints, Workload
from outrider_runtime.simulate.worlds.world import World

STEPS_IN_FLIGHT = 2
"""Most scheduled steps without an output, as in vLLM's batch queue in asynchronous scheduling."""
NO_SLOT = -1
NOT_PLANNED = -1


class Policy(Protocol):
    """Makes the decisions: `control.controller.Controller`, or an object with the same methods."""

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan: ...
    def plan_draft(self, batch: Batch) -> DraftPlan: ...
    def observe(self, outcome: Outcome) -> None: ...
    def release(self, slots: Ints) -> None: ...


class OnDevice(Protocol):
    """Decides on the device, when a step runs, which scheduled draft tokens the target scores."""

    def keep(self, slots: Ints, others: Ints, scheduled: Ints, sampling: int) -> Ints: ...
    def step(self, slots: Ints, accepted: Ints, verified: Ints, log_odds: Floats) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """The parts of a simulation that the policy cannot change."""

    world: World
    recording: Recording
    drafters: tuple[Drafter, ...]
    """Drafters of the pool, in its order; each is in the world and in the recording."""
    limits: Limits
    decision_us: tuple[tuple[int, float], ...] = ((1, 0.0),)
    """(batch size, microseconds) of two decisions and an observation; interpolated linearly."""
    asynchronous: bool = True
    """Whether a step is scheduled while the one before it runs, as vLLM does on GPUs."""
    device_ranks: bool = False
    """Whether the device chooses the proposals to verify, if the policy's plans order it (`RankedProposals`)."""
    patience_s: tuple[float, ...] = ()
    """How long a request of each SLO class may wait. Requests are admitted by deadline, and the policy knows the next.

    Empty: first come, first served.
    """
    confidences: bool = True
    """Whether a synchronous policy knows the confidences of pending proposals.

    The loop in vLLM knows those that the worker reports: of lookups, and of models if the device ranks. The replay's
    lookups have the length of their match, vLLM's how many matches agree (`drafters.suffix`).
    """
    bundled: bool = False
    """Whether the engine is the bundled one, which knows its proposals.

    Then the target's token after an accepted node is also a trial of nodes that it did not score.
    """


@dataclass(slots=True)
class Log:
    """A few numbers of each step."""

    output_at_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class ReplayEngine:
    """One pod's engine under one policy.

    Synchronous: a step is scheduled after the output of the last one, with its proposals.
    Asynchronous: step t+1 is scheduled while t runs. The scheduler counts every draft token of t as accepted, and every
    draft token that t is to propose as proposed (`control.pending_proposals`). The output of t corrects the first. The
    report on the drafting of t comes with the output of t+1 and corrects the second; the policy observes t then.
    """

    def __init__(self, setting: Setting, load: Workload, policy: Policy) -> None:
        self.setting, self.policy = setting, policy
        self.requests = ReplayRequests(load)
        """The scheduler's view of the requests."""
        self.log = Log()
        self.now = 0.0
        """The host's clock."""
        self._scheduler = Scheduler(self.requests, setting.limits)
        # vLLM's drafters do not know where an answer ends, and asynchronous steps may run beyond its end.
        on_device = ReplayRequests(load if setting.bundled else replace(load, output=load.output + 4 * DEPTH))
        self._device = Device(setting.world, setting.recording, setting.drafters, on_device)
        self._on_device: OnDevice | None = getattr(policy, "on_device", None)
        ranks = setting.device_ranks and bool(setting.drafters)
        self._ranking = RankedProposals(len(load)) if ranks else None
        self._calibrator = Calibrator(len(setting.drafters), DEPTH)
        self._proposals = no_proposals(setting.limits.slots, DEPTH)
        self._in_flight: deque[Flight] = deque()
        """Steps whose output has not arrived, the oldest first."""
        self._unobserved: dict[int, Flight] = {}
        """Steps that the policy has not observed, by number."""
        self._unreported: list[Flight] = []
        """Steps whose reports on drafting come with the next output."""
        self._leaving: deque[tuple[int, int]] = deque()
        """(last step, slot) of requests that are done or preempted, the oldest first."""
        self._number = 0
        self._free_at = 0.0
        """Time at which the device has run all scheduled steps."""
        self._last_output_at = 0.0
        self._next = 0
        self._decision = tuple(zip(*setting.decision_us, strict=True))
        self._patience_s = np.array([*setting.patience_s, max(setting.patience_s, default=0.0)])
        """Seconds of each class; the last entry is for requests without a class."""

    def run(self, until_s: float = np.inf) -> None:
        """Run until every request has finished, or until a time."""
        while self.now < until_s and self.advance():
            pass

    def advance(self) -> bool:
        """Run one iteration of vLLM's engine core, or wait for the next request. Returns False at the end."""
        self._arrive()
        if len(self._scheduler.running) or self._scheduler.waiting:
            if self._schedule() and self.setting.asynchronous and len(self._in_flight) < STEPS_IN_FLIGHT:
                return True
        elif not self._in_flight:
            if self._next >= len(self.requests.load):
                return False
            self.now = max(self.now, float(self.requests.load.at_s[self._next]))
            return True
        self._receive(self._in_flight.popleft())
        return True

    def lengthen(self, rows: Rows, tokens: Ints) -> None:
        """Add `tokens` (N,) to the prompts of requests, as if they had been computed."""
        for requests in (self.requests, self._device.requests):
            requests.context[rows] += tokens
            requests.prompt[rows] += tokens

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

    # -- schedule -------------------------------------------------------------------------------------------------

    def _schedule(self) -> bool:
        """Schedule a step. Returns whether there was anything to schedule."""
        scheduled_at = self.now
        running = self.requests.select(self._scheduler.running)
        proposals = self._proposals_for(running)
        forest = proposals.forest(len(self.setting.drafters))
        verify = self.policy.plan_verify(self._batch(running, None), forest)
        placeholders, budget = _placeholders(verify), verify.token_budget
        if budget is not None and verify.device is not None:
            budget += int(placeholders.sum()) - verify.device.tokens
        step = self._scheduler.schedule(running, placeholders, budget, verify.admit)
        if len(step.preempted):
            self._device.forget(step.preempted)
            self._leave(step.preempted)
        if not len(step.rows):
            return False
        nodes = verify.nodes
        if step.paused:
            nodes = nodes[np.isin(running.rows, step.rows)[forest.request]]
        order = None if verify.device is None else _reorder(verify.device, running.rows, step.rows)
        self._run_step(step, nodes, verify.purpose, scheduled_at, order)
        return True

    def _proposals_for(self, states: RequestStates) -> PendingProposals:
        """Return the scheduler's view of the pending proposals."""
        self._proposals.cut(states.slot, np.where(states.decodes, DEPTH, 0))
        proposals = self._proposals.of(states.slot)
        if not self.setting.asynchronous and (self.setting.bundled or self.setting.confidences):
            forest = self._device.proposals.forest(states.rows, confidences=self.setting.confidences)
            proposals.nodes = Nodes(*forest.columns)
        return proposals

    def _batch(self, states: RequestStates, tokens: Ints | None) -> Batch:
        """Make the policy's input. tokens: (N,), tokens of the step; None: it is not scheduled yet."""
        limits, scheduler = self.setting.limits, self._scheduler
        computed = np.minimum(states.todo, limits.token_budget) if tokens is None else tokens
        chunk = np.where(states.decodes, 0, computed)
        if tokens is None:  # plan_verify does not read it
            missing = np.zeros((len(self.setting.drafters), len(chunk)), np.int64)
        else:
            missing, _, _ = self._device.caches.columns(states, tokens)
        return Batch(
            slot=states.slot,
            slo_class=states.slo_class,
            context=states.context,
            prompt=chunk,
            prompt_left=np.where(states.decodes, 0, states.todo - chunk),
            left=states.left,
            emitted=states.produced,
            elapsed_s=np.where(states.produced > 0, self.now - states.first_s, 0.0),
            missing=missing,
            now_s=self.now,
            token_budget=limits.token_budget,
            free_kv_tokens=scheduler.free_tokens(),
            next=self._next_waiting(),
            patience_used=self._patience_used(states) if self.setting.patience_s else 0.0,
            waiting=min(len(scheduler.waiting), limits.max_requests - len(scheduler.running)),
        )

    def _next_waiting(self) -> Waiting | None:
        if not self._scheduler.waiting:
            return None
        load, row = self.requests.load, self._scheduler.waiting[0]
        overdue = bool(self.setting.patience_s) and bool(self.now >= self.requests.due_s[row])
        return Waiting(int(load.slo_class[row]), int(load.prompt[row]), int(load.output[row]), overdue)

    def _patience_used(self, states: RequestStates) -> float:
        """Return the largest share of its patience that a request has used, before its first output token.

        It looks at prefills and at the first waiting request; preempted requests do not count.
        """
        rows = states.rows[states.produced == 0]
        if self._scheduler.waiting:
            rows = np.append(rows, self._scheduler.waiting[0])
        due_s, arrived_s = self.requests.due_s[rows], self.requests.arrived_s[rows]
        used = (self.now - arrived_s) / (due_s - arrived_s)
        return float(used[np.isfinite(due_s)].max(initial=0.0))

    # -- run ------------------------------------------------------------------------------------------------------

    def _run_step(
        self, step: Scheduled, nodes: Bools, purpose: Purpose, scheduled_at: float, order: DeviceOrder | None
    ) -> None:  # fmt: skip
        """Run a scheduled step.

        nodes: (M,), known proposals that the target scores. order: for a device that ranks.
        """
        states, device = self.requests.select(step.rows), self._device
        batch = self._batch(states, step.tokens)
        plan = self.policy.plan_draft(batch)
        draft_tokens = np.where(states.decodes, step.tokens - 1, 0)
        kept = self._choose_verified(states, step.tokens, draft_tokens, order)
        forest = device.proposals.forest(step.rows)
        knows = self.setting.bundled and not self.setting.asynchronous
        if not knows:
            nodes = forest.depth <= kept[forest.request]
        right = device.proposals.right(forest, step.rows)
        accepted = np.bincount(forest.request[nodes & right], minlength=len(step.rows))
        record = self._record(states, batch, step, plan, purpose, scheduled_at)
        verdicts = self._verdicts(forest, nodes, right) if knows else None
        tokens = step.tokens - draft_tokens + kept
        fed = np.clip(
            _fed_tokens(plan, batch, step.tokens, self.setting.drafters, self._fed_blocks),
            0,
            np.maximum(0, batch.missing - (draft_tokens - kept)),
        )
        ran = device.run(device.requests.select(step.rows), tokens, kept, accepted, plan, fed)
        if self._on_device:
            log_odds = device.proposals.log_odds(step.rows, plan.draft_tokens)
            self._on_device.step(states.slot, ran.accepted, kept, log_odds)
        self._rank_next(step.rows)
        record.runs[list(ran.draft_s)] = True
        self._fly(record, step.rows, draft_tokens, kept, int(np.count_nonzero(nodes)), ran, verdicts)
        self._proposals.ask(states.slot, plan, self._number)
        self.requests.schedule(states, step.tokens)

    @property
    def _fed_blocks(self) -> Bools:
        """(D,): see `Controller.fed_blocks`; a policy without it feeds according to its plans."""
        return np.asarray(getattr(self.policy, "fed_blocks", np.zeros(len(self.setting.drafters), bool)))

    def _choose_verified(
        self, states: RequestStates, tokens: Ints, draft_tokens: Ints, order: DeviceOrder | None
    ) -> Ints:
        """(N,): scheduled draft tokens that the target's pass runs."""
        if self._ranking is not None and order is not None and draft_tokens.any():
            return self._ranking.lengths(states.rows, draft_tokens, order)
        if self._on_device is None:
            return draft_tokens
        sampling = int(np.count_nonzero(states.decodes | (tokens == states.todo)))
        return self._on_device.keep(states.slot, tokens - draft_tokens, draft_tokens, sampling)

    def _rank_next(self, rows: Rows) -> None:
        """Give a device that ranks the proposals for the next step."""
        if self._ranking is not None:
            proposals = self._device.proposals
            confidence = proposals.reported_confidence(rows, models=True)
            lengths, drafters = proposals.length[rows], proposals.drafter[rows]
            self._ranking.record(rows, lengths, drafters, confidence, self._calibrator.current)

    def _record(
        self,
        states: RequestStates,
        batch: Batch,
        step: Scheduled,
        plan: DraftPlan,
        purpose: Purpose,
        scheduled_at: float,
    ) -> Record:
        self._number += 1
        names = [str(row) for row in step.rows.tolist()]
        scheduled = ScheduledStep(names, states.slot, states.context, states.context, batch.prompt, step.tokens)
        runs = np.zeros(len(self.setting.drafters), bool)
        proposals = self._proposals_for(states)
        placeholders, graph_tokens = np.where(states.decodes, step.tokens - 1, 0), self.setting.world.graph_tokens
        return Record(
            self._number, scheduled_at, scheduled, batch, proposals, purpose, plan, runs, (), graph_tokens, placeholders
        )  # fmt: skip

    def _fly(
        self, record: Record, rows: Rows, draft_tokens: Ints, kept: Ints, verified: int, ran: DeviceStep,
        verdicts: NodeVerdicts | None,
    ) -> None:  # fmt: skip
        """Put the step on the device's queue, after the host's decision."""
        self.now += self._decision_s(len(rows))
        began_at, before = max(self.now, self._free_at), max(record.scheduled_at, self._free_at)
        self._free_at = began_at + ran.seconds
        out_at = began_at + ran.target_s if self.setting.asynchronous else self._free_at
        report = self._report(record.number, rows, ran)
        flight = Flight(
            record, rows, draft_tokens, kept, verified, ran, report, verdicts, self._free_at - before, out_at
        )
        self._in_flight.append(flight)
        self._unobserved[record.number] = flight

    def _report(self, number: int, rows: Rows, ran: DeviceStep) -> DraftingReport:
        proposals = self._device.proposals
        lengths, drafters = proposals.length[rows].astype(np.int8), proposals.drafter[rows].astype(np.int8)
        seconds = ran.each_draft_s(len(self.setting.drafters))
        confidence = proposals.reported_confidence(rows, models=self.setting.device_ranks)
        return DraftingReport(number, seconds, lengths, drafters, confidence)

    def _verdicts(self, forest: Forest, nodes: Bools, right: Bools) -> NodeVerdicts:
        """Return the results of nodes, for an engine that knows its proposals."""
        accepted = nodes & right
        tried = (forest.parent == ROOT) | accepted[forest.parent]
        return NodeVerdicts(nodes, right & tried, tried)

    def _decision_s(self, requests: int) -> float:
        at, us = self._decision
        return float(np.interp(requests, at, us)) / 1e6

    # -- observe --------------------------------------------------------------------------------------------------

    def _receive(self, flight: Flight) -> None:
        """Take the output of a step, with its own draft report, or in asynchronous mode that of the step before."""
        self.now = max(self.now, flight.out_at)
        self._unreported.append(flight)
        kept = 1 if self.setting.asynchronous else 0
        while len(self._unreported) > kept:
            self._take_report(self._unreported.pop(0))
        record, step_s = flight.record, self.now - max(self._last_output_at, flight.record.scheduled_at)
        self._last_output_at = self.now
        tokens, done = self._deliver(flight)
        verdicts = flight.counts if flight.verdicts is None else flight.verdicts
        record.result = TargetResult(self.now, step_s, flight.ran.target_s, tokens, verdicts)
        if record.draft_report is not None or record.number == self._number:
            self._observe(flight)
        self._note(flight, tokens)
        self._retire(done)

    def _take_report(self, flight: Flight) -> None:
        record, report = flight.record, flight.report
        record.draft_report = report
        if record.plan.draft_tokens:
            lengths, drafters = report.proposed.astype(np.int64), report.proposer.astype(np.int64)
            confidence = confidences(report.confidence)
            later = [step.record.proposals for number, step in self._unobserved.items() if number > record.number]
            for proposals in (self._proposals, *later):
                proposals.record(record.number, record.step.slots, lengths, drafters, confidence)
        if record.number in self._unobserved and record.result is not None:
            self._observe(flight)

    def _observe(self, flight: Flight) -> None:
        del self._unobserved[flight.record.number]
        outcome = flight.record.outcome()
        self.policy.observe(outcome)
        if self._ranking is not None:
            self._calibrator.observe(outcome.forest, outcome.tried, outcome.accepted)
        self._free_slots()

    def _deliver(self, flight: Flight) -> tuple[int, Rows]:
        """Return the number of tokens sent to users, and the requests that end with them."""
        requests, rows, ran = self.requests, flight.rows, flight.ran
        there = requests.slot[rows] == flight.record.step.slots  # neither done nor preempted since
        requests.context[rows] -= np.where(there, flight.draft_tokens - ran.accepted, 0)
        requests.placeholders[rows] -= np.where(there & (ran.tokens > 0), 1 + flight.draft_tokens, 0)
        produced = requests.produced[rows]
        made = np.clip(ran.tokens, 0, requests.load.output[rows] - produced)
        requests.first_s[rows[(made > 0) & (produced == 0)]] = self.now
        requests.produced[rows] = produced + made
        return int(made.sum()), rows[(made > 0) & (produced + made == requests.load.output[rows])]

    def _note(self, flight: Flight, tokens: int) -> None:
        log = self.log
        log.output_at_s.append(self.now)
        log.step_s.append(flight.step_s)
        log.tokens.append(tokens)
        log.requests.append(len(flight.rows))
        log.verified.append(flight.verified)
        log.accepted.append(int(flight.ran.accepted.sum()))

    # -- requests go ----------------------------------------------------------------------------------------------

    def _retire(self, done: Rows) -> None:
        if len(done):
            self.requests.done_s[done] = self.now
            self._leave(done[self.requests.slot[done] != NO_SLOT])
            self._scheduler.finish(done)

    def _leave(self, rows: Rows) -> None:
        slots = self.requests.slot[rows]
        self._proposals.clear(slots)
        self._leaving.extend((self._number, slot) for slot in slots.tolist())
        self.requests.slot[rows] = NO_SLOT
        self._free_slots()

    def _free_slots(self) -> None:
        """Free slots of requests without an unobserved step."""
        oldest = min(self._unobserved, default=self._number + 1)
        free = []
        while self._leaving and self._leaving[0][0] < oldest:
            free.append(self._leaving.popleft()[1])
        if free:
            self.policy.release(np.array(free, np.int64))
            self._scheduler.free(free)


def _placeholders(plan: VerifyPlan) -> Ints:
    """(N,): draft tokens to schedule for each request; with a device order the device chooses among them."""
    if plan.device is None:
        return plan.lengths
    return plan.device.caps if plan.device.tokens else np.zeros_like(plan.lengths)


def _reorder(order: DeviceOrder, planned: Rows, rows: Rows) -> DeviceOrder:
    """Convert an order for the requests `planned` to one for `rows` (N,); new requests have no drafts."""
    place = {row: number for number, row in enumerate(planned.tolist())}
    at = np.array([place.get(row, NOT_PLANNED) for row in rows.tolist()], np.int64)
    forced = np.where(at == NOT_PLANNED, 0, order.forced[at]) if len(planned) else np.zeros_like(at)
    weights = np.where(at == NOT_PLANNED, 1.0, order.weights[at]) if len(planned) else np.ones(len(at))
    return replace(order, forced=forced, weights=weights)


def _fed_tokens(plan: DraftPlan, batch: Batch, tokens: Ints, drafters: tuple[Drafter, ...], fed_blocks: Bools) -> Ints:
    """(D, N): tokens that each drafter processes.

    They are the plan's, and all that the drafter misses of requests that it proposes for; of a block drafter the whole
    step. tokens: (N,), tokens of the step. fed_blocks: (D,), block drafters that are fed in any case.
    """
    fed = np.minimum(plan.feed, batch.missing)
    for number, drafter in enumerate(drafters):
        if drafter.is_block:
            fed[number] = tokens * (plan.passes[number] > 0 or fed_blocks[number] or fed[number].any())
        elif drafter.reads and plan.passes[number]:
            proposes: Bools = (plan.drafter_order == number).any(0)
            fed[number] = np.where(proposes, batch.missing[number], fed[number])
    return np.asarray(fed)
