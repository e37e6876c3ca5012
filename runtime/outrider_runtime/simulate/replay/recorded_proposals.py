"""Proposals of drafters, and their accepted lengths, read from the recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import NO_DRAFTER, Bools, Floats
from outrider_runtime.control.plans import DraftPlan, Forest, chains, nothing_proposed
from outrider_runtime.control.settings import Drafter
from outrider_runtime.loop.confidences import MAX_QUANTA, QUANTA_PER_UNIT, UNKNOWN
from outrider_runtime.simulate.recording import DEPTH, LOG_ODDS, Recording
from outrider_runtime.simulate.replay.beams import RecordedBeams, Table
from outrider_runtime.simulate.replay.replay_requests import ReplayRequests, RequestStates, Rows
from outrider_runtime.simulate.replay.workload import Ints

FULL, NO_PROMPT, AFTER_GAP = "", "/no-prompt", "/after-hole"
READ_ENOUGH = 0.5
"""A head that has read a smaller share of the prompt proposes like one that has read none."""
FORGOTTEN_AFTER = 64
"""Committed tokens after which a head's gap has no effect: twice the gap of the recording."""


@dataclass(frozen=True, slots=True, eq=False)
class Coverages:
    """Numbers of a drafter's columns in the recording."""

    full: int
    no_prompt: int
    after_gap: int


class RecordedProposals:
    """Pending proposals, as columns over all requests."""

    def __init__(self, recording: Recording, drafters: Sequence[Drafter], requests: ReplayRequests) -> None:
        self._drafters, self._positions = drafters, recording.depth.shape[1]
        self._depths, self._proposed = recording.depth.ravel(), recording.proposed.ravel()
        self._sure = recording.confidence.reshape(-1, DEPTH)
        self._looks_up = np.array([_is_lookup(drafter) for drafter in drafters] + [False])
        """Flags of the drafters by number; the last entry is for requests without a drafter."""
        self._columns = [_coverages(recording, drafter.name) for drafter in drafters]
        self._beams = {
            number: RecordedBeams(recording.trees[drafter.name])
            for number, drafter in enumerate(drafters)
            if drafter.name in recording.trees
        }
        count = len(requests.load)
        start = recording.start[requests.load.answer].astype(np.int64)
        self._start, self._length = start, recording.start[requests.load.answer + 1] - start
        self.drafter: Ints = np.full(count, NO_DRAFTER, np.int64)
        self.length: Ints = np.zeros(count, np.int64)
        self._depth: Ints = np.zeros(count, np.int64)
        self._width: Ints = np.ones(count, np.int64)
        """Width of the trees; 1: a chain."""
        self._place: Ints = np.zeros(count, np.int64)
        """Position in the recording."""
        self._confidence = np.zeros((count, DEPTH), np.float32)
        self._drafter_order: Ints = np.full((1, count), NO_DRAFTER, np.int64)
        self._plan: DraftPlan | None = None

    def forest(self, rows: Rows, *, confidences: bool = True) -> Forest:
        """Return the pending proposals as trees. confidences: whether they include confidences."""
        lengths, plan = self.length[rows], self._plan
        if plan is None:
            return nothing_proposed(len(rows), len(self._drafters))
        drafter_order = self._drafter_order[:, rows]
        if not lengths.any():
            return chains(lengths, lengths, plan, drafter_order)
        if self._has_trees(rows):
            request, parent, depth, rank, certain = self._table(rows).nodes
            drafter = self.drafter[rows][request]
            return Forest(request, parent, drafter, depth, rank, certain, drafter_order, plan.passes, plan.purpose)
        there = np.arange(DEPTH) < lengths[:, None]
        sure = self._confidence[rows][there].astype(np.float64) if confidences else None
        return chains(lengths, self.drafter[rows], plan, drafter_order, sure)

    def log_odds(self, rows: Rows, length: int) -> NDArray[np.float64]:
        """(N, length): confidences of a model in its draft tokens."""
        return np.asarray(np.nan_to_num(self._confidence[rows, :length]), np.float64)

    def reported_confidence(self, rows: Rows, *, models: bool = False) -> NDArray[np.int8]:
        """(N, K): confidences of the proposals, see `loop.confidences`. models: whether models report theirs, too."""
        reported = (self.length[rows] > 0) & (models | self._looks_up[self.drafter[rows]])
        there = reported[:, None] & (np.arange(DEPTH) < self.length[rows, None])
        quanta = np.clip(np.rint(self._confidence[rows] * QUANTA_PER_UNIT), -MAX_QUANTA, MAX_QUANTA)
        return np.where(there, quanta, UNKNOWN).astype(np.int8)

    def _has_trees(self, rows: Rows) -> bool:
        return bool((self._width[rows] > 1).any())

    def _table(self, rows: Rows) -> Table:
        """Return the beams of a step with trees of one drafter; chains if its cache has a gap."""
        number, width = int(self.drafter[rows].max()), int(self._width[rows].max())
        lengths = self.length[rows]
        table = self._beams[number].table(self._place[rows], lengths, width)
        chains_ = self._width[rows] == 1
        depth = np.arange(DEPTH)
        table.there[chains_] = False
        table.there[chains_, :, 0] = depth < lengths[chains_, None]
        table.parent[chains_] = 0
        table.confidence[chains_, :, 0] = self._confidence[rows][chains_]
        table.right[chains_, :, 0] = depth < self._depth[rows][chains_, None]
        return table

    def right(self, forest: Forest, rows: Rows) -> Bools:
        """(M,): nodes that the target accepts, given their parents. forest: the proposals of `rows`."""
        if self._has_trees(rows):
            table = self._table(rows)
            return np.asarray(table.right[table.there])
        return np.asarray(forest.depth <= self._depth[rows[forest.request]])

    def accepted_lengths(self, rows: Rows, verified: Ints) -> Ints:
        """(N,): accepted lengths of chains. verified: (N,), placeholders that the target scores."""
        return np.asarray(np.minimum(np.minimum(self._depth[rows], self.length[rows]), verified))

    def clear(self, rows: Rows) -> None:
        self.length[rows], self._width[rows] = 0, 1
        self.drafter[rows] = NO_DRAFTER
        for drafters in self._drafter_order:
            drafters[rows] = NO_DRAFTER

    def expect(self, rows: Rows, plan: DraftPlan) -> None:
        """Drop the pending proposals of a step's requests, and expect those of a plan."""
        self._plan = plan
        ranks = plan.drafter_order.shape[0]
        if self._drafter_order.shape[0] != ranks:
            self._drafter_order = np.full((ranks, self._drafter_order.shape[1]), NO_DRAFTER, np.int64)
        self.clear(rows)

    def propose(self, states: RequestStates, plan: DraftPlan, missing: Ints, read: Floats, whole: Ints) -> None:
        """Propose for the requests that decode next, after `expect`. The (D, N) columns are those of `ReplayCaches`."""
        ranks = plan.drafter_order.shape[0]
        for drafters, planned in zip(self._drafter_order, plan.drafter_order, strict=True):
            drafters[states.rows] = np.where(states.decodes, planned, NO_DRAFTER)
        open_ = states.decodes & (states.left > 1)
        for rank in range(ranks):
            for number in plan.passes.nonzero()[0].tolist():
                asks = ((plan.drafter_order[rank] == number) & open_).nonzero()[0]
                if len(asks):
                    state = (missing[number, asks], read[number, asks], whole[number, asks])
                    proposed = self._propose_by(number, states, asks, int(plan.passes[number]), state)
                    if plan.widths[number] > 1:
                        self._widen(number, states, asks, int(plan.widths[number]), state)
                    open_[asks[proposed]] = False

    def _widen(
        self, number: int, states: RequestStates, asks: Ints, width: int, state: tuple[Ints, Floats, Ints]
    ) -> None:  # fmt: skip
        """Replace a drafter's chains by trees for requests without a gap in its cache."""
        missing, read, whole = state
        complete = (missing <= 0) if self._drafters[number].needs_kv else np.ones(len(asks), bool)
        if self._drafters[number].needs_hidden:
            complete &= (read >= READ_ENOUGH) & ((whole >= FORGOTTEN_AFTER) | (whole >= states.context[asks]))
        self._width[states.rows[asks[complete]]] = width

    def _propose_by(
        self, number: int, states: RequestStates, asks: Ints, length: int, state: tuple[Ints, Floats, Ints]
    ) -> NDArray[np.bool_]:
        """Propose by one drafter for requests `asks`; returns for which of them it has a proposal."""
        missing, read, whole = state
        rows, columns, drafter = states.rows[asks], self._columns[number], self._drafters[number]
        place = self._start[rows] + (states.produced[asks] - 1) % self._length[rows]
        column: Ints | int = columns.full
        if drafter.needs_hidden:
            column = np.where(whole < FORGOTTEN_AFTER, columns.after_gap, columns.full)
            column[whole >= states.context[asks]] = columns.full
            column[read < READ_ENOUGH] = columns.no_prompt
        self._place[rows] = place
        at = column * self._positions + place
        depth, lengths, sure = self._depths.take(at), self._proposed.take(at), self._sure[at].astype(np.float32)
        self._depth[rows] = np.where(missing > 0, 0, depth) if drafter.needs_kv else depth
        self.length[rows] = np.minimum(lengths, np.minimum(length, states.left[asks] - 1))
        has = np.asarray(lengths > 0)
        self.drafter[rows] = np.where(has, number, self.drafter[rows])
        self._confidence[rows] = sure if _is_lookup(drafter) else sure * (LOG_ODDS / 127)
        return has


def _is_lookup(drafter: Drafter) -> bool:
    return not drafter.stands_in


def _coverages(recording: Recording, name: str) -> Coverages:
    names = recording.drafters
    full = names.index(name)
    numbers = [
        names.index(name + coverage) if name + coverage in names else full for coverage in (NO_PROMPT, AFTER_GAP)
    ]
    return Coverages(full, *numbers)


def mean_acceptance_rates(recording: Recording, name: str, rows: NDArray[np.integer] | None = None) -> Floats:
    """(DEPTH,): P(proposal accepted | the one before it was), by depth."""
    number = recording.drafters.index(name)
    depth, proposed = recording.depth[number], recording.proposed[number]
    if rows is not None:
        keep = np.concatenate([np.arange(recording.start[row], recording.start[row + 1]) for row in rows])
        depth, proposed = depth[keep], proposed[keep]
    at = np.arange(1, DEPTH + 1)[:, None]
    tried = ((depth[None] >= at - 1) & (proposed[None] >= at)).sum(1)
    return np.asarray((depth[None] >= at).sum(1) / np.maximum(tried, 1), np.float64)
