"""Which tokens run in the next step: vLLM's rules for continuous batching with chunked prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider_runtime.simulate.replay.requests import BLOCK_TOKENS, Requests, Rows, blocks
from outrider_runtime.simulate.replay.workload import Ints


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine was started with."""

    token_budget: int = 8192
    """max_num_batched_tokens."""
    max_requests: int = 256
    """max_num_seqs."""
    kv_tokens: int = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """The step's requests."""

    rows: Rows
    tokens: Ints
    """(N,) that each computes, its verified proposals among them."""


class Scheduler:
    """Running requests first, each with its proposals or its next prompt chunk, then those that wait, in order; where
    KV runs out, the one that came last gives way."""

    def __init__(self, requests: Requests, limits: Limits) -> None:
        self.requests, self.limits = requests, limits
        self.running: list[int] = []
        self.waiting: list[int] = []
        self._slots = list(range(limits.max_requests - 1, -1, -1))
        self._blocks = limits.kv_tokens // BLOCK_TOKENS

    def rows(self) -> Rows:
        return np.array(self.running, np.int64)

    def free_tokens(self) -> int:
        return int(self._blocks - blocks(self.requests.context[self.rows()]).sum()) * BLOCK_TOKENS

    def schedule(self, verified: Ints, token_budget: int | None, admit: int | None) -> Scheduled:
        """verified: (running,) proposals that each scores. token_budget, admit: less than the engine's own limits."""
        budget = min(self.limits.token_budget, token_budget or self.limits.token_budget)
        rows = self.rows()
        decodes = self.requests.decoding(rows)
        tokens = np.where(decodes, 1 + verified, 0)
        budget -= int(tokens.sum())
        for place in np.flatnonzero(~decodes):
            tokens[place] = chunk = max(0, min(int(self.requests.todo(rows[place : place + 1])[0]), budget))
            budget -= chunk
        preempted = self._make_room(rows, tokens)
        kept = (tokens > 0) & ~np.isin(rows, preempted)
        rows, tokens = rows[kept], tokens[kept]
        if preempted:
            return Scheduled(rows, tokens)
        new, chunks = self._admit(budget, self._taken(rows, tokens), admit)
        return Scheduled(np.append(rows, new).astype(np.int64), np.append(tokens, chunks).astype(np.int64))

    def _taken(self, rows: Rows, tokens: Ints) -> int:
        """Blocks after the step, those of running requests that have no tokens in it included."""
        context = self.requests.context.copy()
        context[rows] += tokens
        return int(blocks(context[self.rows()]).sum())

    def _make_room(self, rows: Rows, tokens: Ints) -> list[int]:
        preempted: list[int] = []
        after = dict(zip(rows.tolist(), (self.requests.context[rows] + tokens).tolist(), strict=True))
        need = int(blocks(self.requests.context[rows] + tokens).sum())
        while need > self._blocks and len(self.running) > 1:
            last = self.running.pop()
            need -= -(-after[last] // BLOCK_TOKENS)
            self.requests.context[last] = 0
            self.requests.preemptions += 1
            self._slots.append(int(self.requests.slot[last]))
            self.waiting.insert(0, last)
            preempted.append(last)
        return preempted

    def _admit(self, budget: int, taken: int, most: int | None) -> tuple[list[int], list[int]]:
        new: list[int] = []
        chunks: list[int] = []
        while self.waiting and budget > 0 and self._slots and (most is None or len(new) < most):
            row = self.waiting[0]
            chunk = min(int(self.requests.load.prompt[row] + self.requests.produced[row]), budget)
            taken += -(-chunk // BLOCK_TOKENS)
            if taken > self._blocks:
                break
            self.waiting.pop(0)
            self.requests.slot[row] = self._slots.pop()
            self.running.append(row)
            new.append(row)
            chunks.append(chunk)
            budget -= chunk
        return new, chunks

    def finish(self, done: Rows) -> None:
        self._slots.extend(self.requests.slot[done].tolist())
        gone = set(done.tolist())
        self.running = [row for row in self.running if row not in gone]
