"""Which tokens run in the next step: vLLM's rules for continuous batching with chunked prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider_runtime.loop.slots import SLOTS_PER_REQUEST
from outrider_runtime.simulate.replay.replay_requests import BLOCK_TOKENS, Books, ReplayRequests, Rows, blocks
from outrider_runtime.simulate.replay.workload import Ints


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine was started with."""

    token_budget: int = 8192
    """max_num_batched_tokens."""
    max_requests: int = 256
    """max_num_seqs."""
    kv_tokens: int = 1 << 30

    @property
    def slots(self) -> int:
        """A request leaves its slot some steps before the last one that it was in is observed."""
        return SLOTS_PER_REQUEST * self.max_requests


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """The step's requests."""

    rows: Rows
    """Those that ran before come first, in the same order."""
    tokens: Ints
    """(N,) that each computes, its verified proposals among them."""
    paused: bool
    """Some that ran before have no tokens in this step."""
    preempted: Rows


class Scheduler:
    """Running requests first, each with its proposals or its next prompt chunk, then those that wait, by when they are
    due; where KV runs out, the one that was let in last gives way."""

    def __init__(self, requests: ReplayRequests, limits: Limits) -> None:
        self.requests, self.limits = requests, limits
        self.running: Rows = np.zeros(0, np.int64)
        self.waiting: deque[int] = deque()
        self._slots = list(range(limits.slots - 1, -1, -1))
        self._blocks = limits.kv_tokens // BLOCK_TOKENS

    def free_tokens(self) -> int:
        """Those that fit into blocks which requests hold are among them."""
        return self._blocks * BLOCK_TOKENS - int(self.requests.context[self.running].sum())

    def wait(self, row: int) -> None:
        """Behind those that are due no later."""
        place, due_s = len(self.waiting), self.requests.due_s
        while place and due_s[self.waiting[place - 1]] > due_s[row]:
            place -= 1
        self.waiting.insert(place, row)

    def schedule(self, running: Books, verified: Ints, token_budget: int | None, admit: int | None) -> Scheduled:
        """verified: (running,) proposals that each scores. token_budget, admit: less than the engine's own limits."""
        budget = min(self.limits.token_budget, token_budget or self.limits.token_budget)
        tokens = np.where(running.decodes, 1 + verified, 0)
        tokens[self.requests.ends_in_flight(running.rows)] = 0
        budget -= int(tokens.sum())
        for place in (~running.decodes).nonzero()[0]:
            tokens[place] = chunk = max(0, min(int(running.todo[place]), budget))
            budget -= chunk
        held = blocks(running.context + tokens)
        preempted = self._make_room(held)
        kept = tokens > 0
        kept[len(kept) - len(preempted) :] = False
        rows, tokens, paused = running.rows, tokens, False
        if not kept.all():
            rows, tokens, paused = rows[kept], tokens[kept], True
        if not len(preempted) and self.waiting:
            new, chunks = self._admit(budget, int(held.sum()), admit)
            rows, tokens = np.concatenate((rows, new)), np.concatenate((tokens, chunks))
        return Scheduled(rows, tokens, paused, preempted)

    def _make_room(self, held: Ints) -> Rows:
        """held: (running,) blocks after the step. Preempts from the end until they fit."""
        need, keep = int(held.sum()), len(held)
        while need > self._blocks and keep > 1:
            keep -= 1
            need -= int(held[keep])
        gone, self.running = self.running[keep:], self.running[:keep]
        if len(gone):
            self.requests.preempt(gone)
            self.requests.due_s[gone] = -np.inf
            self.requests.preemptions += len(gone)
            self.waiting.extendleft(gone[::-1].tolist())
        return gone

    def _admit(self, budget: int, taken: int, most: int | None) -> tuple[Ints, Ints]:
        new: list[int] = []
        chunks: list[int] = []
        places = self.limits.max_requests - len(self.running)
        places = places if most is None else min(most, places)
        while self.waiting and budget > 0 and self._slots and len(new) < places:
            row = self.waiting[0]
            chunk = min(int(self.requests.load.prompt[row] + self.requests.produced[row]), budget)
            taken += -(-chunk // BLOCK_TOKENS)
            if taken > self._blocks:
                break
            self.waiting.popleft()
            self.requests.slot[row] = self._slots.pop()
            new.append(row)
            chunks.append(chunk)
            budget -= chunk
        self.running = np.concatenate((self.running, np.array(new, np.int64)))
        return np.array(new, np.int64), np.array(chunks, np.int64)

    def free(self, slots: Sequence[int]) -> None:
        """Gives these slots to new requests."""
        self._slots.extend(slots)

    def finish(self, done: Rows) -> None:
        """Output in flight may end a request that was preempted: it waits then."""
        for row in set(self.waiting) & set(done.tolist()):
            self.waiting.remove(row)
        self.running = self.running[np.isnan(self.requests.done_s[self.running])]
