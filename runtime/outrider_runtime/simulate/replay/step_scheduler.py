"""Chooses the tokens of the next step, by vLLM's rules for continuous batching with chunked prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider_runtime.loop.slots import SLOTS_PER_REQUEST
from outrider_runtime.simulate.replay.replay_requests import BLOCK_TOKENS, ReplayRequests, RequestStates, Rows, blocks
from outrider_runtime.simulate.replay.workload import Ints


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engine, fixed at its start."""

    token_budget: int = 8192
    """max_num_batched_tokens."""
    max_requests: int = 256
    """max_num_seqs."""
    kv_tokens: int = 1 << 30

    @property
    def slots(self) -> int:
        """Number of slots: a request leaves its slot some steps before its last step is observed."""
        return SLOTS_PER_REQUEST * self.max_requests


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A scheduled step."""

    rows: Rows
    """Requests of the step; those that ran before come first, in the same order."""
    tokens: Ints
    """(N,): tokens that each request computes, verified proposals included."""
    paused: bool
    """Whether some running request has no tokens in this step."""
    preempted: Rows


class Scheduler:
    """Schedules running requests first, with their proposals or next prefill chunks, then waiting ones by deadline.

    If the KV cache is full, the request that was admitted last is preempted.
    """

    def __init__(self, requests: ReplayRequests, limits: Limits) -> None:
        self.requests, self.limits = requests, limits
        self.running: Rows = np.zeros(0, np.int64)
        self.waiting: deque[int] = deque()
        self._slots = list(range(limits.slots - 1, -1, -1))
        self._blocks = limits.kv_tokens // BLOCK_TOKENS

    def free_tokens(self) -> int:
        """Return the tokens that still fit into the KV cache, room in the requests' last blocks included."""
        return self._blocks * BLOCK_TOKENS - int(self.requests.context[self.running].sum())

    def wait(self, row: int) -> None:
        """Queue a request behind those that are due no later."""
        place, due_s = len(self.waiting), self.requests.due_s
        while place and due_s[self.waiting[place - 1]] > due_s[row]:
            place -= 1
        self.waiting.insert(place, row)

    def schedule(
        self, running: RequestStates, verified: Ints, token_budget: int | None, admit: int | None
    ) -> Scheduled:
        """Schedule a step.

        verified: (running,), proposals that each request verifies. token_budget, admit: limits below the engine's own.
        """
        budget = min(self.limits.token_budget, token_budget or self.limits.token_budget)
        tokens = np.where(running.decodes, 1 + verified, 0)
        tokens[self.requests.ends_in_flight(running.rows)] = 0
        budget -= int(tokens.sum())
        for place in (~running.decodes).nonzero()[0]:
            tokens[place] = chunk = max(0, min(int(running.todo[place]), budget))
            budget -= chunk
        blocks_needed = blocks(running.context + tokens)
        preempted = self._make_room(blocks_needed)
        kept = tokens > 0
        kept[len(kept) - len(preempted) :] = False
        rows, tokens, paused = running.rows, tokens, False
        if not kept.all():
            rows, tokens, paused = rows[kept], tokens[kept], True
        if not len(preempted) and self.waiting:
            new, chunks = self._admit(budget, int(blocks_needed.sum()), admit)
            rows, tokens = np.concatenate((rows, new)), np.concatenate((tokens, chunks))
        return Scheduled(rows, tokens, paused, preempted)

    def _make_room(self, blocks_needed: Ints) -> Rows:
        """Preempt requests from the end until all fit. blocks_needed: (running,), blocks after the step."""
        need, keep = int(blocks_needed.sum()), len(blocks_needed)
        while need > self._blocks and keep > 1:
            keep -= 1
            need -= int(blocks_needed[keep])
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
        """Make these slots available to new requests."""
        self._slots.extend(slots)

    def finish(self, done: Rows) -> None:
        """Remove finished requests; one that was preempted may end by output in flight, while it waits."""
        for row in set(self.waiting) & set(done.tolist()):
            self.waiting.remove(row)
        self.running = self.running[np.isnan(self.requests.done_s[self.running])]
