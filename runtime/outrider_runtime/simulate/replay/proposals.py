"""What drafters propose, and how far the target agrees: read from the recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.core.batch import NOBODY, Floats
from outrider_runtime.core.forest import Forest, chains, nothing_proposed
from outrider_runtime.core.plans import DraftPlan
from outrider_runtime.core.settings import Drafter
from outrider_runtime.simulate.recording import DEPTH, LOG_ODDS, Recording
from outrider_runtime.simulate.replay.requests import Requests, Rows
from outrider_runtime.simulate.replay.workload import Ints

FULL, NO_PROMPT, AFTER_HOLE = "", "/no-prompt", "/after-hole"
READ_ENOUGH = 0.5
"""A head that has read less of the prompt proposes as one that has read none."""
CLOSED = 64
"""Committed tokens after which a head's hole is forgotten: twice the hole of the recording."""
JUNK_SHIFT = 37
"""A draft model over a hole is as sure of its junk as at another position of the same answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Coverages:
    """Numbers of a drafter's columns in the recording."""

    full: int
    no_prompt: int
    after_hole: int


class Proposals:
    """Those that wait for the next step, in columns over all requests."""

    def __init__(self, recording: Recording, drafters: Sequence[Drafter], requests: Requests) -> None:
        self._recording, self._drafters, self._requests = recording, drafters, requests
        self._columns = [_coverages(recording, drafter.name) for drafter in drafters]
        count = len(requests.load)
        start = recording.start[requests.load.answer].astype(np.int64)
        self._start, self._length = start, recording.start[requests.load.answer + 1] - start
        self.drafter: Ints = np.full(count, NOBODY, np.int64)
        self.length: Ints = np.zeros(count, np.int64)
        self._depth: Ints = np.zeros(count, np.int64)
        self._confidence = np.zeros((count, DEPTH), np.float32)
        self._asked: Ints = np.full((1, count), NOBODY, np.int64)
        self._plan: DraftPlan | None = None

    def forest(self, rows: Rows) -> Forest:
        if self._plan is None or not self.length[rows].any():
            plan = self._plan
            empty = nothing_proposed(len(rows), len(self._drafters))
            if plan is None:
                return empty
            return Forest(
                empty.request, empty.parent, empty.drafter, empty.depth, empty.confidence, self._asked[:, rows],
                plan.passes, plan.purpose,
            )  # fmt: skip
        lengths = self.length[rows]
        sure = self._confidence[rows][np.arange(DEPTH) < lengths[:, None]].astype(np.float64)
        return chains(lengths, self.drafter[rows], self._plan, self._asked[:, rows], sure)

    def accepted(self, rows: Rows, verified: Ints) -> Ints:
        """(N,) of the verified proposals (N,), those that the target agrees with."""
        return np.asarray(np.minimum(self._depth[rows], verified))

    def clear(self, rows: Rows) -> None:
        self.length[rows] = 0
        self.drafter[rows] = NOBODY
        self._asked[:, rows] = NOBODY

    def propose(self, rows: Rows, plan: DraftPlan, missing: Ints, read: Floats, whole: Ints) -> None:
        """Rows that decode next; the plan's columns are theirs, the others (D, N) say what each drafter has read."""
        self._plan = plan
        ranks = plan.asked.shape[0]
        if self._asked.shape[0] != ranks:
            self._asked = np.full((ranks, self._asked.shape[1]), NOBODY, np.int64)
        self._asked[:, rows] = plan.asked
        self.length[rows] = 0
        open_ = self._requests.left(rows) > 1
        for rank in range(ranks):
            for number in range(len(self._drafters)):
                asks = (plan.asked[rank] == number) & open_ & (self.length[rows] == 0) & (plan.passes[number] > 0)
                if asks.any():
                    state = (missing[number, asks], read[number, asks], whole[number, asks])
                    self._by(number, rows[asks], int(plan.passes[number]), state)

    def _by(self, number: int, rows: Rows, length: int, state: tuple[Ints, Floats, Ints]) -> None:
        """One drafter's proposals for requests that ask it."""
        missing, read, whole = state
        columns, drafter = self._columns[number], self._drafters[number]
        place = self._start[rows] + (self._requests.produced[rows] - 1) % self._length[rows]
        column = np.full(len(rows), columns.full)
        if drafter.needs_hidden:
            column = np.where(whole < CLOSED, columns.after_hole, column)
            column = np.where((whole >= self._requests.context[rows]), columns.full, column)
            column = np.where(read < READ_ENOUGH, columns.no_prompt, column)
        depth = self._recording.depth[column, place].astype(np.int64)
        found = self._recording.proposed[column, place]
        sure = self._recording.confidence[column, place].astype(np.float32)
        if drafter.needs_kv:
            depth = np.where(missing > 0, 0, depth)
        limit = np.minimum(length, self._requests.left(rows) - 1)
        self.length[rows] = np.minimum(found, limit)
        self.drafter[rows] = np.where(found > 0, number, self.drafter[rows])
        self._depth[rows] = depth
        self._confidence[rows] = sure if _is_lookup(drafter) else sure * (LOG_ODDS / 127)


def _is_lookup(drafter: Drafter) -> bool:
    return not drafter.passes


def _coverages(recording: Recording, name: str) -> Coverages:
    names = recording.drafters
    full = names.index(name)
    numbers = [names.index(name + one) if name + one in names else full for one in (NO_PROMPT, AFTER_HOLE)]
    return Coverages(full, *numbers)


def mean_hazards(recording: Recording, name: str, rows: NDArray[np.integer] | None = None) -> Floats:
    """(DEPTH,) probability that a proposal is accepted, given that the one before it was."""
    number = recording.drafters.index(name)
    depth, proposed = recording.depth[number], recording.proposed[number]
    if rows is not None:
        keep = np.concatenate([np.arange(recording.start[row], recording.start[row + 1]) for row in rows])
        depth, proposed = depth[keep], proposed[keep]
    at = np.arange(1, DEPTH + 1)[:, None]
    tried = ((depth[None] >= at - 1) & (proposed[None] >= at)).sum(1)
    return np.asarray((depth[None] >= at).sum(1) / np.maximum(tried, 1), np.float64)
