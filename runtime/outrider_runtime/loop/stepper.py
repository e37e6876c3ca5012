"""The calls of an engine's scheduler at each step, on the scheduler's thread.

    verify(view)                 before a step is scheduled: choose the proposals that its target pass scores
    draft(view, ...)             when the step is scheduled: choose the drafters that propose at its end
    on_draft_reports(reports)    when the engine reports results of drafting
    on_output(step, ...)         when its output arrives; in asynchronous scheduling after `draft` of the next step

The controller observes a step as soon as its output and its draft report are known. Shapes: N requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Batch, Floats, Ints, Waiting
from outrider_runtime.control.pending_proposals import PendingProposals, no_proposals
from outrider_runtime.control.plans import Forest, Nodes, Purpose, VerifyPlan
from outrider_runtime.loop.confidences import confidences
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.coverage import ScheduledStep, step_rows
from outrider_runtime.loop.draft_caches import DraftCaches, DrafterBlockIds
from outrider_runtime.loop.orders import Order, carry_out
from outrider_runtime.loop.request_table import RequestTable
from outrider_runtime.loop.step_columns import (
    CERTAIN,
    LEFT,
    PROMPT,
    PROMPT_LEFT,
    SLO_CLASS,
    columns_ahead,
    columns_scheduled,
)
from outrider_runtime.loop.steps import ChainCounts, DraftingResult, FinishedStep, NodeVerdicts, Record, TargetResult


class View(NamedTuple):
    """The engine's requests, in its order. All columns (N,) int64."""

    names: Sequence[str]
    context: Ints
    """Tokens whose KV is cached before the step; proposals under verification count as accepted."""
    known: Ints
    """Prompt and output tokens that the host knows."""
    todo: Ints
    """Tokens known or in flight that are not computed yet; 1 for a decoding request: the last sampled token."""
    emitted: Ints
    """Output tokens that the host knows."""


class Room(NamedTuple):
    """The rest of a decision's input; see the fields of the same names in `Batch`, in the same order."""

    now_s: float
    token_budget: int
    free_kv_tokens: int
    next: Waiting | None = None
    waiting: int = 0
    patience_used: float = 0.0


def room_in_blocks(context: Ints, block_size: int) -> int:
    """Count the tokens that still fit into the requests' last blocks. context: (N,), their cached tokens."""
    return int((-context % block_size).sum())


class Stepper:
    def __init__(
        self, loop: ControlLoop, *, block_size: int, block_ids: DrafterBlockIds, reports_drafting: bool,
        now_s: float, largest_graph_tokens: int | None = None, predecessor: Stepper | None = None,
    ) -> None:  # fmt: skip
        """reports_drafting: whether `on_draft_reports` is called for every step sooner or later.

        predecessor: the failed Stepper that this one replaces; its request clocks and step numbers carry over.
        """
        slots = loop.settings.slots
        known_requests = predecessor.requests if predecessor else None
        self.requests: RequestTable = RequestTable(loop.slo, loop.arms, loop.adapters, slots, known_requests)
        self.caches = DraftCaches(loop.settings.drafters, slots, block_size, block_ids)
        self._loop = loop
        self._reports_drafting = reports_drafting
        self._largest_graph_tokens = largest_graph_tokens
        self._proposals = no_proposals(slots, loop.settings.max_draft_tokens)
        self._ahead: tuple[View, Ints, PendingProposals] | None = None
        """Slots and proposals of the last `verify`, until a step is scheduled or something of them changes."""
        self._purpose = Purpose.FIXED
        """Purpose of the last draft plan."""
        self._number: int = predecessor._number if predecessor else 0
        self._records: dict[int, Record] = {}
        self._awaiting_report: dict[int, Record] = {}
        """Steps that the controller observed before their draft report arrived."""
        self._last_output_at = now_s
        if predecessor:
            loop.release(np.arange(slots))

    @property
    def last_step(self) -> int:
        """Number of the last step that was scheduled."""
        return self._number

    # -- decide -------------------------------------------------------------------------------------------------

    def nothing_to_verify(self, requests: int) -> VerifyPlan:
        """Return the plan for a step without proposals, in which no request needs to be held back.

        requests: their number.
        """
        self._loop.nothing_to_verify()
        return VerifyPlan(np.zeros(0, bool), np.zeros(requests, np.int64), self._purpose)

    def verify(self, view: View, proposed: Ints | Nodes, room: Room) -> VerifyPlan:
        """Choose the proposals that the step verifies.

        proposed: the engine's pending trees; for chains (N,), the pending tokens of each request.
        """
        with self._loop.lock:
            self.requests.number_classes(self._loop.class_names)
            slots = self._slots(view.names)
            if not isinstance(proposed, Nodes):
                self._proposals.cut(slots, proposed)
            waiting = self._proposals.of(slots)
            waiting.nodes = proposed if isinstance(proposed, Nodes) else None
            self._ahead = view, slots, waiting
            forest = self._forest(waiting)
            if self._loop.profiled_placeholders is not None:
                return self._all_placeholders(forest, proposed)
            return self._loop.plan_verify(self._batch_ahead(view, slots, room), forest)

    def _all_placeholders(self, forest: Forest, proposed: Ints | Nodes) -> VerifyPlan:
        if isinstance(proposed, Nodes):
            proposed = np.bincount(proposed.request, minlength=forest.drafter_order.shape[1])
        return VerifyPlan(np.ones(len(forest), bool), proposed, Purpose.FIXED)

    def draft(
        self, view: View, tokens: Ints, proposed: Ints, room: Room, verify: VerifyPlan, nodes: Nodes | None = None
    ) -> tuple[int, Order]:
        """Return the step's number, and the drafters' order for its end.

        tokens: (N,), tokens of each request that the step computes. proposed: (N,), proposals among them. nodes: all
        pending trees, whether the step verifies them or not; None: chains.
        """
        with self._loop.lock:
            self.requests.number_classes(self._loop.class_names)  # another config may have come since `verify`
            slots, proposals = self._waiting(view)
            columns, elapsed_s = columns_scheduled(
                slots, (view.context, view.known, view.todo), tokens, proposed, self.requests.columns, room.now_s
            )
            step = ScheduledStep(view.names, slots, view.context, columns[CERTAIN], columns[PROMPT], tokens)
            batch = self._batch(view, slots, columns, elapsed_s, self.caches.missing(step), room)
            self._loop.request_names = view.names
            plan = self._loop.plan_draft(batch)
            order = carry_out(plan, batch, step, self._loop.settings.drafters, self.caches, self._loop.fed_blocks)
        proposals.nodes = nodes
        self._record(step, batch, order, verify, proposals, proposed)
        return self._number, order

    def _waiting(self, view: View) -> tuple[Ints, PendingProposals]:
        """Return slots and pending proposals of the requests; those of `verify` if the scheduled step has its view."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is view:
            return ahead[1], ahead[2]
        slots = self._slots(view.names)
        return slots, self._proposals.of(slots)

    def _record(
        self,
        step: ScheduledStep,
        batch: Batch,
        order: Order,
        verify: VerifyPlan,
        proposals: PendingProposals,
        placeholders: Ints,
    ) -> None:
        self._number += 1
        self._records[self._number] = Record(
            self._number, batch.now_s, step, batch, proposals, verify.purpose, order.plan, order.runs, order.gaps,
            self._largest_graph_tokens, placeholders,
        )  # fmt: skip
        self._proposals.ask(step.slots, order.plan, self._number)
        self._purpose = order.plan.purpose

    def _forest(self, waiting: PendingProposals) -> Forest:
        forest = waiting.forest(len(self._loop.settings.drafters))
        return forest if len(forest) else replace(forest, purpose=self._purpose)

    def _slots(self, names: Sequence[str]) -> Ints:
        slots = self.requests.running(names)
        self._loop.running = len(self.requests.slots)
        if self.requests.slots.early:
            self._loop.release(np.array(self.requests.slots.early))
            self.requests.slots.early.clear()
        return slots

    def _batch_ahead(self, view: View, slots: Ints, room: Room) -> Batch:
        columns, elapsed_s = columns_ahead(
            slots, view.known, view.todo, self.requests.columns, room.now_s, room.token_budget
        )
        missing = np.zeros((len(self._loop.settings.drafters), len(slots)), np.int64)
        return self._batch(view, slots, columns, elapsed_s, missing, room)

    def _batch(self, view: View, slots: Ints, columns: Ints, elapsed_s: Floats, missing: Ints, room: Room) -> Batch:
        return Batch(
            slots, columns[SLO_CLASS], view.context, columns[PROMPT], columns[PROMPT_LEFT], columns[LEFT], view.emitted,
            elapsed_s, missing, *room, self.requests.arms(slots),
        )  # fmt: skip

    # -- observe ------------------------------------------------------------------------------------------------

    def on_draft_reports(self, reports: Iterable[DraftingResult]) -> None:
        """Take the engine's reports on drafting.

        Call it before the engine forgets requests that end now, and before `on_output` of the step that verified the
        proposals.
        """
        self._ahead = None
        for report in reports:
            record = self._records.get(report.step) or self._awaiting_report.pop(report.step, None)
            if record is None:
                continue
            record.draft_report = report
            self._note_proposals(record, report)
            self._note_misses(record, report)
            for number, reason in report.failures.items():
                self._loop.drafter_failed(self._loop.settings.drafters[number].name, reason)
            if report.step in self._records and record.result is not None:
                self._observe(record)

    def on_output(
        self, number: int, *, output_at: float, target_s: float, tokens: int, verdicts: NodeVerdicts | ChainCounts
    ) -> None:
        """Take the output of step `number`. target_s: seconds of the target pass on the device; NaN: not measured."""
        record = self._records.get(number)
        if record is None:
            return
        step_s = output_at - max(self._last_output_at, record.scheduled_at)
        self._last_output_at = output_at
        record.result = TargetResult(output_at, step_s, target_s, tokens, verdicts)
        if record.draft_report is not None or not self._reports_drafting:
            self._observe(record)
        elif number == self._number:  # no later step runs, so its draft report may take arbitrarily long
            self._observe(record)
            self._awaiting_report[number] = record

    def _observe(self, record: Record) -> None:
        del self._records[record.number]
        adapters = self.requests.adapters(record.step.slots)
        self._loop.observe(FinishedStep(record.outcome(), record.executed(), adapters))
        if record.draft_report is not None and record.draft_report.catch_up_s:
            took_s = record.draft_report.catch_up_s
            tokens = sum(gap.end - gap.start for gap in record.gaps if gap.drafter in took_s)
            self._loop.caught_up(tokens, sum(took_s.values()))
        self._free_slots()

    def _note_proposals(self, record: Record, report: DraftingResult) -> None:
        if not record.plan.draft_tokens or report.proposed is None or report.proposer is None:
            return
        lengths, drafters = report.proposed.astype(np.int64), report.proposer.astype(np.int64)
        confidence = np.zeros((len(lengths), 0)) if report.confidence is None else confidences(report.confidence)
        later = [step.proposals for step in self._records.values() if step.number > record.number]
        for proposals in (self._proposals, *later):
            proposals.record(record.number, record.step.slots, lengths, drafters, confidence)

    def _note_misses(self, record: Record, report: DraftingResult) -> None:
        """Take back the coverage of drafters that did not run as planned."""
        seconds = zip(record.runs.tolist(), report.seconds.tolist(), strict=True)
        failed = [number for number, (runs, took_s) in enumerate(seconds) if runs and math.isnan(took_s)]
        step = self._remaining(record.step) if failed else record.step
        for number in failed:
            self.caches.missed(number, step)
        if not record.gaps:
            return
        unfilled = [gap for gap in record.gaps if gap.drafter not in report.catch_up_s]
        self.caches.not_filled([gap for gap in unfilled if self._remains(record.step, gap.request)], record.step)

    def _remaining(self, step: ScheduledStep) -> ScheduledStep:
        """Select the step's requests that still run."""
        rows = [row for row in range(len(step.names)) if self._remains(step, row)]
        return step_rows(step, np.array(rows, np.int64))

    def _remains(self, step: ScheduledStep, row: int) -> bool:
        """Return whether the slot of this row still belongs to the same request."""
        return self.requests.slots.get(step.names[row]) == int(step.slots[row])

    # -- requests go --------------------------------------------------------------------------------------------

    def kv_lost(self, drafter: int, name: str) -> None:
        """Note that the request's KV in this drafter's own cache is gone."""
        slot = self.requests.slots.get(name)
        if slot is not None:
            self.caches.lost(drafter, name, slot)

    def leaves(self, name: str) -> None:
        """Drop a request that ended or was preempted, with all that is cached for it."""
        slot = self.requests.slots.get(name)
        if slot is None:
            return
        self._ahead = None
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
