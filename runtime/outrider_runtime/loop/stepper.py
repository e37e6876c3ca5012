"""An engine's steps: what its scheduler calls, on the scheduler's thread.

    verify(view)        before a step is scheduled: what its target pass scores of what was proposed
    draft(view, ...)    when it is scheduled: who proposes at its end
    news(reports)       whenever the engine tells how drafting went
    done(step, ...)     the step's output is there; in asynchronous scheduling after `draft` of the next one

A step is told to the controller as soon as its output and its drafting are known. Shapes: N requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider_runtime.control.data.batch import Batch, Ints, Waiting
from outrider_runtime.control.data.forest import Forest, Nodes
from outrider_runtime.control.data.plans import Purpose, VerifyPlan
from outrider_runtime.loop.confidences import confidences
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.coverage import ScheduledStep, step_rows
from outrider_runtime.loop.draft_caches import DraftCaches, DrafterBlockIds
from outrider_runtime.loop.orders import Order, carry_out
from outrider_runtime.loop.pending_proposals import no_proposals
from outrider_runtime.loop.request_table import RequestTable
from outrider_runtime.loop.steps import ChainCounts, DraftingResult, FinishedStep, NodeVerdicts, Record, TargetResult


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Requests as an engine knows them, in its order. All columns (N,) int64."""

    names: Sequence[str]
    context: Ints
    """Tokens whose KV is cached before the step; proposals under verification are counted as accepted."""
    known: Ints
    """Tokens that the host knows: prompt and answer."""
    todo: Ints
    """Tokens that are known or under way, and not computed; 1 in a request that decodes: the last sampled one."""
    emitted: Ints
    """Of the answer, the tokens that the host knows."""


@dataclass(frozen=True, slots=True)
class Room:
    """What else a decision hangs on; the fields are those of `Batch`."""

    now: float
    token_budget: int
    free_kv_tokens: int
    next: Waiting | None = None
    waiting: int = 0
    patience_used: float = 0.0


def room_in_blocks(context: Ints, block_size: int) -> int:
    """Tokens that still fit into blocks which requests hold. context: (N,), their cached tokens."""
    return int((-context % block_size).sum())


class Stepper:
    def __init__(
        self, loop: ControlLoop, *, block_size: int, block_ids: DrafterBlockIds, drafting_is_told: bool,
        now: float, largest_graph_tokens: int | None = None, after: Stepper | None = None,
    ) -> None:  # fmt: skip
        """drafting_is_told: sooner or later `news` comes of every step. after: the books before these, which raised;
        of them the requests' clocks and the steps' numbers go on."""
        slots = loop.settings.slots
        self.requests: RequestTable = RequestTable(loop.slo, loop.arms, slots, after.requests if after else None)
        self.caches = DraftCaches(loop.settings.drafters, slots, block_size, block_ids)
        self._loop = loop
        self._is_told = drafting_is_told
        self._largest_graph_tokens = largest_graph_tokens
        self._proposals = no_proposals(slots, loop.settings.max_draft_tokens)
        self._purpose = Purpose.FIXED
        """Of the last draft plan."""
        self._number: int = after._number if after else 0
        self._records: dict[int, Record] = {}
        self._untold: dict[int, Record] = {}
        """Steps that the controller was told of before the engine told how their drafting went."""
        self._last_output_at = now
        if after:
            loop.release(np.arange(slots))

    # -- decide -------------------------------------------------------------------------------------------------

    def nothing_to_verify(self, requests: int) -> VerifyPlan:
        """The plan where nothing was proposed to any of so many requests, and nobody is to be held back."""
        self._loop.nothing_to_verify()
        return VerifyPlan(np.zeros(0, bool), np.zeros(requests, np.int64), self._purpose)

    def verify(self, view: View, proposed: Ints | Nodes, room: Room) -> VerifyPlan:
        """proposed: what the engine holds; of chains (N,), how many proposals of each request."""
        with self._loop.lock:
            slots = self._slots(view.names)
            if not isinstance(proposed, Nodes):
                self._proposals.cut(slots, proposed)
            forest = self._forest(slots, proposed)
            if self._loop.places is not None:
                return self._every_place(forest, proposed)
            return self._loop.plan_verify(self._batch_ahead(view, slots, room), forest)

    def _every_place(self, forest: Forest, proposed: Ints | Nodes) -> VerifyPlan:
        if isinstance(proposed, Nodes):
            proposed = np.bincount(proposed.request, minlength=forest.asked.shape[1])
        return VerifyPlan(np.ones(len(forest), bool), proposed, Purpose.FIXED)

    def draft(
        self, view: View, tokens: Ints, proposed: Ints, room: Room, verify: VerifyPlan, nodes: Nodes | None = None
    ) -> tuple[int, Order]:
        """The step's number, and what is to be done at its end. tokens: (N,), that the step computes of each request;
        proposed: (N,), those among them that are proposals. nodes: all that wait for the step, verified by it or not;
        None: chains."""
        with self._loop.lock:
            slots = self._slots(view.names)
            known = tokens - proposed
            left = np.maximum(0, view.todo - known)
            decodes = (known == 1) & (left == 0) & (view.context + view.todo > self.requests.prompt[slots])
            prompt = np.where(decodes, 0, known)
            step = ScheduledStep(view.names, slots, view.context, np.minimum(view.context, view.known), prompt, tokens)
            batch = self._batch(view, slots, prompt, left, self.caches.missing(step), room)
            plan = self._loop.plan_draft(batch)
            order = carry_out(plan, batch, step, self._loop.settings.drafters, self.caches, self._loop.fed_blocks)
        self._book(step, batch, order, verify, room.now, nodes, proposed)
        return self._number, order

    def _book(
        self,
        step: ScheduledStep,
        batch: Batch,
        order: Order,
        verify: VerifyPlan,
        now: float,
        nodes: Nodes | None,
        places: Ints,
    ) -> None:
        self._number += 1
        waited = self._proposals.of(step.slots)
        waited.nodes = nodes
        self._records[self._number] = Record(
            self._number, now, step, batch, waited, verify.purpose, order.plan, order.runs, order.holes,
            self._largest_graph_tokens, places,
        )  # fmt: skip
        self._proposals.ask(step.slots, order.plan, self._number)
        self._purpose = order.plan.purpose

    def _forest(self, slots: Ints, proposed: Ints | Nodes) -> Forest:
        proposals = self._proposals.of(slots)
        proposals.nodes = proposed if isinstance(proposed, Nodes) else None
        forest = proposals.forest(len(self._loop.settings.drafters))
        return forest if len(forest) else replace(forest, purpose=self._purpose)

    def _slots(self, names: Sequence[str]) -> Ints:
        self.requests.number_classes(self._loop.class_names)
        slots = self.requests.running(names)
        self._loop.running = len(self.requests.slots)
        if self.requests.slots.early:
            self._loop.release(np.array(self.requests.slots.early))
            self.requests.slots.early.clear()
        return slots

    def _batch_ahead(self, view: View, slots: Ints, room: Room) -> Batch:
        prompt = np.where(view.todo > 1, view.todo, 0)  # one token is the last sampled one: the request decodes
        chunk = np.minimum(prompt, room.token_budget)
        missing = np.zeros((len(self._loop.settings.drafters), len(slots)), np.int64)
        return self._batch(view, slots, chunk, prompt - chunk, missing, room)

    def _batch(self, view: View, slots: Ints, prompt: Ints, prompt_left: Ints, missing: Ints, room: Room) -> Batch:
        requests = self.requests
        return Batch(
            slot=slots, slo_class=requests.classes(slots), context=view.context, prompt=prompt,
            prompt_left=prompt_left, left=requests.left(slots, view.known), emitted=view.emitted,
            elapsed_s=requests.elapsed_s(slots, room.now), missing=missing,
            now=room.now, token_budget=room.token_budget, free_kv_tokens=room.free_kv_tokens, next=room.next,
            waiting=room.waiting, patience_used=room.patience_used, arm=requests.arms(slots),
        )  # fmt: skip

    # -- observe ------------------------------------------------------------------------------------------------

    def news(self, reports: Iterable[DraftingResult]) -> None:
        """Before the engine forgets requests that end now, and before `done` of the step that verified them."""
        for report in reports:
            record = self._records.get(report.step) or self._untold.pop(report.step, None)
            if record is None:
                continue
            record.drafted = report
            self._note_proposals(record, report)
            self._note_misses(record, report)
            for number, reason in report.failures.items():
                self._loop.drafter_failed(self._loop.settings.drafters[number].name, reason)
            if report.step in self._records and record.finished is not None:
                self._tell(record)

    def done(
        self, number: int, *, now: float, target_s: float, tokens: int, verdicts: NodeVerdicts | ChainCounts
    ) -> None:
        """The output of step `number` is there. target_s: the device's time, NaN where nobody measured it."""
        record = self._records.get(number)
        if record is None:
            return
        step_s = now - max(self._last_output_at, record.scheduled_at)
        self._last_output_at = now
        record.finished = TargetResult(now, step_s, target_s, tokens, verdicts)
        if record.drafted is not None or not self._is_told:
            self._tell(record)
        elif number == self._number:  # nothing runs after it: who knows when its drafting is told of
            self._tell(record)
            self._untold[number] = record

    def _tell(self, record: Record) -> None:
        del self._records[record.number]
        self._loop.observe(FinishedStep(record.outcome(), record.ran()))
        if record.drafted is not None and record.drafted.catch_up_s:
            took_s = record.drafted.catch_up_s
            tokens = sum(hole.end - hole.start for hole in record.holes if hole.drafter in took_s)
            self._loop.caught_up(tokens, sum(took_s.values()))
        self._free_slots()

    def _note_proposals(self, record: Record, report: DraftingResult) -> None:
        if not record.plan.draft_tokens or report.proposed is None or report.proposer is None:
            return
        lengths, drafters = report.proposed.astype(np.int64), report.proposer.astype(np.int64)
        said = None if report.confidence is None else confidences(report.confidence)
        later = [one.waited for one in self._records.values() if one.number > record.number]
        for proposals in (self._proposals, *later):
            proposals.came_back(record.number, record.step.slots, lengths, drafters, said)

    def _note_misses(self, record: Record, report: DraftingResult) -> None:
        """Drafters were to run, and did not."""
        failed = np.flatnonzero(record.runs & np.isnan(report.seconds))
        step = self._still_there(record.step) if len(failed) else record.step
        for number in failed:
            self.caches.missed(int(number), step)
        open_still = [hole for hole in record.holes if hole.drafter not in report.catch_up_s]
        self.caches.left_open([gap for gap in open_still if self._is_there(record.step, gap.request)], record.step)

    def _still_there(self, step: ScheduledStep) -> ScheduledStep:
        """The step's requests that have not left since."""
        there = [row for row in range(len(step.names)) if self._is_there(step, row)]
        return step_rows(step, np.array(there, np.int64))

    def _is_there(self, step: ScheduledStep, row: int) -> bool:
        """Whether the slot of this row is still the same request's."""
        return self.requests.slots.get(step.names[row]) == int(step.slots[row])

    # -- requests go --------------------------------------------------------------------------------------------

    def kv_lost(self, drafter: int, name: str) -> None:
        """The request's KV in this drafter's own cache is gone."""
        slot = self.requests.slots.get(name)
        if slot is not None:
            self.caches.lost(drafter, name, slot)

    def leaves(self, name: str) -> None:
        """The request has ended, or was preempted: nothing is cached any more."""
        slot = self.requests.slots.get(name)
        if slot is None:
            return
        self._proposals.clear(np.array([slot]))
        self.caches.forget(slot)
        self.requests.slots.leave(name, self._number)
        self._loop.arms.left(name, self._number)
        self._loop.running = len(self.requests.slots)
        self._free_slots()

    def _free_slots(self) -> None:
        observed_before = min(self._records, default=self._number + 1)
        self._loop.arms.observed(observed_before)
        freed = self.requests.slots.over(observed_before)
        if freed:
            self._loop.release(np.array(freed))
