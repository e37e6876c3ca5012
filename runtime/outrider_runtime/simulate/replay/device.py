"""What runs a step that somebody has scheduled: a target and its drafters, as recorded, at a world's times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.data.plans import DraftPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.recorded_proposals import RecordedProposals
from outrider_runtime.simulate.replay.replay_caches import ReplayCaches
from outrider_runtime.simulate.replay.replay_requests import Books, ReplayRequests, Rows
from outrider_runtime.simulate.replay.workload import Ints
from outrider_runtime.simulate.worlds.world import Pass, World

CATCH_UP_TOKENS = 16
"""A draft that is fed more of a decoding request than this attends as to a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStep:
    """What came of a step."""

    target_s: float
    draft_s: dict[int, float]
    """Of each drafter that ran, by number."""
    accepted: Ints
    """(N,) of the proposals that the target scored."""
    tokens: Ints
    """(N,) of the answer."""

    @property
    def seconds(self) -> float:
        return self.target_s + sum(self.draft_s.values())

    def each_draft_s(self, drafters: int) -> NDArray[np.float64]:
        """(drafters,); NaN: it did not run."""
        return np.array([self.draft_s.get(number, np.nan) for number in range(drafters)])


class Device:
    """D drafters in the pool's order, N requests of a step."""

    def __init__(
        self, world: World, recording: Recording, drafters: Sequence[Drafter], requests: ReplayRequests
    ) -> None:
        self.world, self.drafters, self.requests = world, drafters, requests
        self.caches = ReplayCaches(drafters, len(requests.load))
        self.proposals = RecordedProposals(recording, drafters, requests)

    def forget(self, preempted: Rows) -> None:
        self.requests.preempt(preempted)
        self.caches.forget(preempted)
        self.proposals.clear(preempted)

    def run(
        self, books: Books, tokens: Ints, verified: Ints, accepted: Ints, plan: DraftPlan, fed: Ints
    ) -> DeviceStep:  # fmt: skip
        """tokens (N,): of the step, verified (N,) of them proposals, accepted (N,) of those; fed (D, N): tokens that
        each drafter runs over. At the end the plan's drafters propose. The books of the requests go on, but for the
        time."""
        one, draft_s = _target_pass(books, tokens), self._draft_s(plan, books, fed)
        accepted = np.where(books.decodes, accepted, 0)
        committed = tokens - verified + accepted
        self.caches.feed(books, fed, np.where(books.decodes, 0, tokens), committed)
        made = self._advance(books, tokens, committed, accepted)
        self.proposals.expect(books.rows, plan)
        if plan.passes.any():
            after = self.requests.of(books.rows)
            self.proposals.propose(after, plan, *self.caches.columns(after, np.zeros_like(after.rows)))
        return DeviceStep(self.world.target_s(one), draft_s, accepted, made)

    def _draft_s(self, plan: DraftPlan, books: Books, fed: Ints) -> dict[int, float]:
        seconds = {}
        for number, passes in enumerate(plan.passes.tolist()):
            asks = (plan.asked == number).any(0) & (passes > 0)
            asked, drafter = int(np.count_nonzero(asks)), self.drafters[number]
            if asked or fed[number].any():
                requests = int(np.count_nonzero(books.decodes)) if drafter.stands_in else asked
                if drafter.is_target:
                    context = books.context[asks]
                    read, whole = _read(context, drafter.kv_budget), _read(context, None)
                    one = Pass(asked, asked, read, asked, whole_context=whole)
                else:
                    one = _draft_pass(books, fed[number], requests, drafter.kv_budget)
                seconds[number] = self.world.draft_s(drafter.name, one, passes, int(plan.widths[number]))
        return seconds

    def _advance(self, books: Books, tokens: Ints, committed: Ints, accepted: Ints) -> Ints:
        """(N,) tokens of the answers; a request whose prompt is not read to its end gets none."""
        self.requests.context[books.rows] = books.context + committed
        yields = books.decodes | (tokens == books.todo)
        made = np.where(yields, np.minimum(1 + accepted, books.left), 0)
        self.requests.produced[books.rows] = books.produced + made
        return made


def _target_pass(books: Books, tokens: Ints) -> Pass:
    decodes = books.decodes
    requests, context = _decoding(books)
    if requests == len(tokens):
        batched = int(tokens.sum())
        return Pass(batched, requests, context, batched, (), bool(tokens.min() == tokens.max()))
    prompts, decoding = (~decodes).nonzero()[0], tokens[decodes]
    logits = int(decoding.sum()) + int(np.count_nonzero(tokens[prompts] == books.todo[prompts]))
    chunks = list(zip(tokens[prompts].tolist(), books.context[prompts].tolist(), strict=True))
    even = requests == 0 or bool(decoding.min() == decoding.max())
    return Pass(int(tokens.sum()), requests, context, logits, chunks, even)


def _draft_pass(books: Books, fed: Ints, asked: int, budget: int | None) -> Pass:
    """The first pass: over `fed` (N,); attention as to a prompt where that is more than a step's tokens."""
    long = ((fed > 0) & (~books.decodes | (fed > CATCH_UP_TOKENS))).nonzero()[0]
    prefix = np.maximum(0, books.context[long] - fed[long])
    chunks = list(zip(fed[long].tolist(), _bounded(prefix, budget).tolist(), strict=True))
    return Pass(max(int(fed.sum()), asked), asked, _read(books.context[books.decodes], budget), max(asked, 1), chunks)


def _bounded(context: Ints, budget: int | None) -> Ints:
    return context if budget is None else np.minimum(context, budget)


def _read(context: Ints, budget: int | None) -> float:
    """Cached tokens of a request that a pass reads, on average."""
    return float(_bounded(context, budget).mean()) if len(context) else 0.0


def _decoding(books: Books) -> tuple[int, float]:
    """Requests that decode, and their mean context."""
    requests = int(np.count_nonzero(books.decodes))
    return requests, float((books.context * books.decodes).sum()) / requests if requests else 0.0
