"""A small engine on a virtual clock, for the closed loop's own tests: chains only, known acceptance rates, and a world
whose step times need not have the form of the controller's model.

Tests change `world` and `load` while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from outrider_runtime.control.batch import NO_ARM, NO_CLASS, NO_DRAFTER, Batch
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.plans import (
    DraftPlan,
    ExecutionMode,
    Forest,
    Outcome,
    Purpose,
    chains,
    nothing_proposed,
    trials,
)
from outrider_runtime.control.settings import Drafter, HotSettings, Settings
from outrider_runtime.control.step_times import DrafterCost, LatencyModel, StepCost
from outrider_runtime.loop.arm_counts import ArmCounter

SLOTS = 320
Seconds = Callable[[float, float], float]
"""(tokens in the pass, cached tokens) -> seconds."""


def linear(
    constant: float, token: float, *, knee: float = math.inf, above: float = 0.0, context: float = 0.0
) -> Seconds:
    return lambda tokens, cached: constant + token * tokens + above * max(0.0, tokens - knee) + context * cached


@dataclass(frozen=True, eq=False)
class World:
    target_s: Seconds
    pass_s: dict[int, Seconds]
    """Seconds of each drafter's pass, or of a lookup's call."""
    acceptance: Callable[[Any, Any, Any], Any]
    """(drafter, request number, depth from 0), arrays -> acceptance rate."""
    hit: Callable[[Any, Any], Any] = lambda _drafter, _number: 1.0
    """(drafter, request number), arrays -> hit rate."""
    hidden: float = 0.0
    """Share of each step's time that no device reports."""
    noise: float = 0.03
    """Standard deviation of the log of each measured time."""
    varlen_s: float = 0.0
    """Seconds that a varlen step takes beyond a uniform one."""


@dataclass
class Record:
    """What tests read about one step."""

    requests: int
    passes: list[int]
    drafter_order: np.ndarray
    verified: int
    tokens: int
    seconds: float
    fed: int
    purpose: Purpose


@dataclass
class Columns:
    """The engine's books, by slot."""

    number: np.ndarray = field(default_factory=lambda: np.full(SLOTS, -1))
    slo_class: np.ndarray = field(default_factory=lambda: np.full(SLOTS, NO_CLASS))
    context: np.ndarray = field(default_factory=lambda: np.zeros(SLOTS, np.int64))
    unread: np.ndarray = field(default_factory=lambda: np.zeros(SLOTS, np.int64))
    left: np.ndarray = field(default_factory=lambda: np.zeros(SLOTS, np.int64))
    emitted: np.ndarray = field(default_factory=lambda: np.zeros(SLOTS, np.int64))
    first_at: np.ndarray = field(default_factory=lambda: np.zeros(SLOTS))
    started_at: np.ndarray = field(default_factory=lambda: np.zeros(SLOTS))
    arm: np.ndarray = field(default_factory=lambda: np.full(SLOTS, NO_ARM))


class Engine:
    """Serves `load` requests at any time: a finished one is replaced in the next step. With `bursts` so many come
    together once all of those before have finished. With `arrivals` (requests per second) they come and go instead."""

    def __init__(
        self, world: World, controller: Controller, *, load: int = 0, arrivals: float = 0.0, seed: int = 0,
        prompt: int = 64, output: int = 96, chunk: int = 2048, classes: Callable[[int], int] = lambda _number: NO_CLASS,
        arms: ArmCounter | None = None, bursts: bool = False,
    ) -> None:  # fmt: skip
        """arms: books of a draft canary; None: there is none."""
        self._bursts = bursts
        self.world, self.controller, self.load, self.arrivals = world, controller, load, arrivals
        self.output, self.prompt = output, prompt
        self.now = 100.0
        self._chunk, self._classes, self._arms = chunk, classes, arms
        self._schedules_ahead = controller.settings.scores_placeholders
        self._rng = np.random.default_rng(seed)
        self._drafters = controller.settings.drafters
        self._books = Columns()
        shape = (len(self._drafters), SLOTS)
        self._missing = np.zeros(shape, np.int64)
        self._proposed: tuple[np.ndarray, np.ndarray, DraftPlan, np.ndarray] | None = None
        self._numbers = 0
        self._next_at = self.now
        self.finished: list[tuple[int, float]] = []
        """(class, TPOT) of each request that ended."""
        self.history: list[Record] = []

    def run(self, steps: int) -> list[Record]:
        start = len(self.history)
        while len(self.history) < start + steps:
            self._admit()
            self._step()
        return self.history[start:]

    def _admit(self) -> None:
        books = self._books
        free = np.flatnonzero(books.number < 0)
        running = SLOTS - len(free)
        due = self.load - running if not self.arrivals and not (self._bursts and running) else 0
        while self.arrivals and (self._next_at <= self.now or running == 0 == due):
            self.now = max(self.now, self._next_at)
            self._next_at += self._rng.exponential(1 / self.arrivals)
            due += 1
        for slot in free[: max(0, due)]:
            books.number[slot] = self._numbers
            books.slo_class[slot] = self._classes(self._numbers)
            books.context[slot], books.emitted[slot] = 0, 0
            books.unread[slot] = max(1, round(self.prompt * self._rng.uniform(0.5, 1.5)))
            books.left[slot] = max(2, round(self.output * self._rng.uniform(0.5, 1.5)))
            books.started_at[slot] = self.now
            self._missing[:, slot] = 0
            if self._arms is not None:
                books.arm[slot] = self._arms.arrived(str(self._numbers), None)
                self._arms.runs(str(self._numbers))
            self._numbers += 1

    def _batch(self, rows: np.ndarray, prompt: np.ndarray) -> Batch:
        books = self._books
        elapsed = np.where(books.emitted[rows] > 0, self.now - books.first_at[rows], 0.0)
        return Batch(
            rows, books.slo_class[rows], books.context[rows], prompt, books.unread[rows] - prompt, books.left[rows],
            books.emitted[rows], elapsed, self._missing[:, rows],
            self.now, 8192, 10**6, arm=None if self._arms is None else books.arm[rows],
        )  # fmt: skip

    def _step(self) -> None:
        rows = np.flatnonzero(self._books.number >= 0)
        unread = self._books.unread[rows]
        before = np.cumsum(unread) - unread
        prompt = np.clip(self._chunk - before, 0, unread)
        running = (prompt > 0) | (unread == 0)
        rows, prompt = rows[running], prompt[running]
        batch = self._batch(rows, prompt)
        forest = self._forest(batch)
        places = self._placeholders(batch, forest) if self._schedules_ahead else forest
        verify = self.controller.plan_verify(batch, places)
        verified = verify.lengths
        nodes = forest.depth <= verified[forest.request] if self._schedules_ahead else verify.nodes
        computed = np.where(prompt > 0, prompt, 1 + verified)
        self._feedable(rows, computed)
        batch = self._batch(rows, prompt)
        draft = self.controller.plan_draft(batch)
        accepted = self._accept(batch, forest, nodes)
        lengths = np.bincount(forest.request[accepted], minlength=len(rows))
        even = not prompt.any() and len(set(verified.tolist())) == 1
        target_s, drafts_s, step_s = self._seconds(batch, int(verified.sum()), draft, even=even)
        self.now += step_s
        self._propose(batch, draft)
        tokens = self._commit(rows, prompt, lengths)
        mode = ExecutionMode.UNIFORM if even else ExecutionMode.VARLEN
        outcome = Outcome(
            self.now,
            step_s,
            target_s,
            drafts_s,
            mode,
            tokens,
            batch,
            draft,
            verify.purpose,
            forest,
            nodes,
            accepted,
            trials(forest, nodes, accepted),
            verified,
        )
        self.controller.observe(outcome)
        if self._arms is not None and self.controller.credits is not None:
            self._arms.add([str(number) for number in self._books.number[rows]], self.controller.credits)
        self._feed(rows, computed, draft, lengths, prompt)
        self._end(rows)
        self.history.append(
            Record(
                len(rows), draft.passes.tolist(), draft.drafter_order, int(verified.sum()), tokens, step_s,
                int(draft.feed.sum()), draft.purpose,
            )
        )  # fmt: skip

    def _forest(self, batch: Batch) -> Forest:
        if self._proposed is None:
            return nothing_proposed(len(batch), len(self._drafters))
        lengths, drafter, plan, order = self._proposed
        order = order[:, batch.slot].copy()
        if not (lengths[batch.slot] > 0).any() and not (order >= 0).any():
            return nothing_proposed(len(batch), len(self._drafters), plan.purpose)
        return chains(np.minimum(lengths[batch.slot], batch.left - 1), drafter[batch.slot], plan, order)

    def _placeholders(self, batch: Batch, forest: Forest) -> Forest:
        """Placeholders for all that the drafters of each request may propose."""
        lengths = np.where(forest.drafter_order == NO_DRAFTER, 0, forest.lengths[forest.drafter_order]).max(axis=0)
        if self._proposed is None or not lengths.any():
            return forest
        lengths = np.minimum(lengths, batch.left - 1)
        first = np.where(forest.drafter_order[0] == NO_DRAFTER, forest.drafter_order[-1], forest.drafter_order[0])
        places = chains(lengths, first, self._proposed[2], forest.drafter_order)
        places.placeholders = lengths > 0
        return places

    def _accept(self, batch: Batch, forest: Forest, nodes: np.ndarray) -> np.ndarray:
        """A chain is accepted up to its first node that is not, or that was not verified."""
        number = self._books.number[batch.slot[forest.request]]
        chance = np.broadcast_to(self.world.acceptance(forest.drafter, number, forest.depth - 1), len(forest))
        missed = ~(nodes & (self._rng.random(len(forest)) < chance))
        first_miss = np.full(len(batch), 10**6)
        np.minimum.at(first_miss, forest.request[missed], forest.depth[missed])
        return np.asarray(forest.depth < first_miss[forest.request])

    def _seconds(
        self, batch: Batch, verified: int, draft: DraftPlan, *, even: bool
    ) -> tuple[float, np.ndarray, float]:  # fmt: skip
        noise = np.exp(self._rng.normal(0, self.world.noise, 1 + len(self._drafters)))
        cached = float(batch.context.sum())
        decoding = int((batch.prompt == 0).sum())
        target_s = self.world.target_s(decoding + int(batch.prompt.sum()) + verified, cached)
        target_s = noise[0] * (target_s + (0.0 if even else self.world.varlen_s))
        drafts_s = np.full(len(self._drafters), np.nan)
        for d, drafter in enumerate(self._drafters):
            passes, fed = int(draft.passes[d]), int(draft.feed[d].sum())
            if not passes and not fed:
                continue
            requests, read = decoding, cached
            if drafter.is_target:
                asks = (draft.drafter_order == d).any(axis=0)
                requests, read = int(asks.sum()), float(np.minimum(batch.context, drafter.kv_budget or 0)[asks].sum())
            drafts_s[d] = self.world.pass_s[d](max(fed, requests), read)
            if drafter.passes and passes > 1:
                drafts_s[d] += (passes - 1) * self.world.pass_s[d](requests, read)
            drafts_s[d] *= noise[1 + d]
        all_s = target_s + float(np.nansum(drafts_s))
        hidden = self.world.hidden
        return target_s, drafts_s, all_s / (1.0 - hidden)

    def _propose(self, batch: Batch, draft: DraftPlan) -> None:
        lengths, drafter = np.zeros(SLOTS, np.int64), np.full(SLOTS, NO_DRAFTER)
        order = np.full((len(draft.drafter_order), SLOTS), NO_DRAFTER)
        order[:, batch.slot] = draft.drafter_order
        number = self._books.number[batch.slot]
        for of_rank in draft.drafter_order[::-1]:  # the first that has a proposal counts
            is_hit = (of_rank != NO_DRAFTER) & (batch.prompt_left == 0)
            is_hit &= self._rng.random(len(batch)) < self.world.hit(of_rank, number)
            slots, by = batch.slot[is_hit], of_rank[is_hit]
            lengths[slots], drafter[slots] = draft.passes[by], by
        self._proposed = lengths, drafter, draft, order

    def _commit(self, rows: np.ndarray, prompt: np.ndarray, lengths: np.ndarray) -> int:
        books = self._books
        books.unread[rows] -= prompt
        decodes = (prompt == 0) | (books.unread[rows] == 0)
        gained = np.minimum(np.where(decodes, 1 + lengths, 0), books.left[rows])
        books.context[rows] += np.where(prompt > 0, prompt, 1 + lengths)
        first = (books.emitted[rows] == 0) & (gained > 0)
        books.first_at[rows[first]] = self.now
        books.emitted[rows] += gained
        books.left[rows] -= gained
        return int(gained.sum())

    def _feedable(self, rows: np.ndarray, computed: np.ndarray) -> None:
        for d, drafter in enumerate(self._drafters):
            if drafter.needs_hidden:
                self._missing[d, rows] = computed
            elif drafter.needs_kv:
                self._missing[d, rows] += computed

    def _feed(
        self, rows: np.ndarray, computed: np.ndarray, draft: DraftPlan, lengths: np.ndarray, prompt: np.ndarray
    ) -> None:
        rejected = np.where(prompt > 0, 0, computed - 1 - lengths)
        for d, drafter in enumerate(self._drafters):
            fed = draft.feed[d]
            assert (fed <= self._missing[d, rows]).all()
            if drafter.needs_kv:
                whole = fed == self._missing[d, rows]
                self._missing[d, rows] = np.where(whole, 0, self._missing[d, rows] - fed - rejected)

    def _end(self, rows: np.ndarray) -> None:
        books = self._books
        ended = rows[(books.left[rows] <= 0) & (books.unread[rows] == 0)]
        if not len(ended):
            return
        for slot in ended.tolist():
            tpot = (self.now - books.first_at[slot]) / max(1, books.emitted[slot] - 1)
            self.finished.append((int(books.slo_class[slot]), float(tpot)))
        if self._arms is not None:
            for number, tokens in zip(books.number[ended].tolist(), books.emitted[ended].tolist(), strict=True):
                self._arms.left(str(number), 0)
                self._arms.ended(str(number), tokens, attained=None)
            self._arms.observed(1)
        books.number[ended] = -1
        self.controller.release(ended)


def profile(target: StepCost, drafters: dict[str, DrafterCost], varlen_s: float = 0.0) -> LatencyModel:
    """A profile in which a varlen step takes `varlen_s` more than a uniform one."""
    varlen = replace(target, constant_s=target.constant_s + varlen_s)
    return LatencyModel(dict.fromkeys(ExecutionMode, varlen) | {ExecutionMode.UNIFORM: target}, drafters)


def controller(
    drafters: tuple[Drafter, ...], model: LatencyModel | None, *, length: int = 5, seed: int = 0,
    hot: HotSettings | None = None, scores_placeholders: bool = False,
) -> Controller:  # fmt: skip
    hot = HotSettings(max_draft_tokens=length) if hot is None else hot
    settings = Settings(drafters, length, SLOTS, hot=hot, scores_placeholders=scores_placeholders)
    return Controller(settings, model, clock=lambda: 0.0, rng=np.random.default_rng([seed, 7]))


def goodput(records: list[Record]) -> float:
    return sum(record.tokens for record in records) / sum(record.seconds for record in records)
