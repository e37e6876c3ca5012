"""Which tokens run in the next step: vLLM's rules for continuous batching with chunked prefill, and the plugin's own on
top of them (who waits in which order, what a lowered token budget leaves out)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from outrider_runtime.simulate.books import BLOCK_TOKENS, KVCache, Request
from outrider_runtime.vllm_plugin.waiting import decoding_first, patience_used, place_last

Due = Callable[[Request], float]
"""When a waiting request has waited as long as its SLO class bears."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine was started with."""

    token_budget: int = 8192
    """max_num_batched_tokens."""
    max_requests: int = 256
    """max_num_seqs."""
    kv_tokens: int = 1 << 30
    max_model_len: int = 1 << 30


class Scheduler:
    """Running requests first, each with its proposals or its next prompt chunk, then those that wait, in order; where
    KV runs out, the one that came last gives way."""

    def __init__(self, limits: Limits, due: Due | None = None) -> None:
        """`due`: the order of those that wait; None: as they came."""
        self.limits = limits
        self.due = due
        self.cache = KVCache(limits.kv_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def fits(self, request: Request) -> bool:
        """Whether the request can ever run to its end here."""
        tokens = request.prompt + request.output
        return tokens <= min(self.limits.max_model_len, self.cache.blocks * BLOCK_TOKENS)

    def enqueue(self, request: Request) -> None:
        self.waiting.append(request)
        if self.due is not None:
            place_last(self.waiting, self.due)

    def patience_used(self, now: float) -> float:
        """As the plugin's: by the request that waits in front, or one whose prompt is being read."""
        due = self.due
        if due is None:
            return 0.0
        prompts = [*(one for one in self.running if not one.produced), *islice(self.waiting, 1)]
        return patience_used(now, [(one.arrival.at_s, due(one)) for one in prompts if not one.preemptions])

    def schedule(
        self, lengths: Sequence[int], token_budget: int | None = None, *, admit: int | None = None
    ) -> list[Request]:
        """The step's requests, `scheduled` and `verified` set.

        `lengths`: proposals that each running request verifies, in the order of `running`. `token_budget`: of this
        step, where it is less than the engine's. `admit`: most waiting requests that may start.
        """
        planned = list(zip(self.running, lengths, strict=True))
        budget = self.limits.token_budget
        if token_budget is not None:
            budget = min(budget, token_budget)
            planned = decoding_first(planned, lambda one: one[0].decodes)
        running, preempted = self._schedule_running(planned, budget)
        budget -= sum(request.scheduled for request in running)
        if not preempted:
            running += self._admit(budget, self.limits.max_requests if admit is None else admit)
        return running

    def _schedule_running(self, planned: list[tuple[Request, int]], budget: int) -> tuple[list[Request], bool]:
        step: list[Request] = []
        preempted = False
        for request, length in planned:
            if request.blocks == 0:
                continue  # gave way to one before it
            assert length == 0 or 0 < length <= min(request.proposed, request.output - request.produced - 1)
            left = request.prompt + request.produced - request.context
            tokens = min(left + length, budget)
            if tokens == 0:
                continue
            while not self.cache.grow(request, request.context + tokens):
                preempted = True
                if self._preempt() is request:
                    break
            else:
                request.scheduled, request.verified = tokens, max(0, tokens - left)
                budget -= tokens
                step.append(request)
        return step, preempted

    def _preempt(self) -> Request:
        last = self.running.pop()
        self.cache.release(last)
        last.restart()
        self.waiting.appendleft(last)
        return last

    def _admit(self, budget: int, most: int) -> list[Request]:
        admitted: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_requests and len(admitted) < most:
            request = self.waiting[0]
            tokens = min(request.left, budget)
            if not self.cache.grow(request, tokens):
                break
            self.waiting.popleft()
            request.scheduled, request.verified = tokens, 0
            self.running.append(request)
            admitted.append(request)
            budget -= tokens
        return admitted

    def finish(self, done: Sequence[Request]) -> None:
        for request in done:
            self.cache.release(request)
        self.running = [request for request in self.running if request.produced < request.output]
