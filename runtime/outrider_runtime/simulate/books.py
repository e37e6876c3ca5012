"""The engine's books on its requests, as vLLM's scheduler keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider_runtime.control.batch import Miss, RequestView
from outrider_runtime.simulate.workload import Arrival

BLOCK_TOKENS = 16


@dataclass(slots=True)
class Request:
    """One request in the engine."""

    number: int
    id: str
    arrival: Arrival
    slo_class: str | None
    prompt: int
    output: int
    context: int = 0
    """Tokens whose KV is cached."""
    produced: int = 0
    first_token_at: float = 0.0
    drafted: int = 0
    """Of the context, tokens from the beginning on that the neural draft has seen."""
    proposed: int = 0
    asked: int = 0
    drafter: str | None = None
    missed: Miss | None = None
    scheduled: int = 0
    """Tokens in the present step, and how many of them are proposals."""
    verified: int = 0
    blocks: int = 0
    preemptions: int = 0

    @property
    def left(self) -> int:
        """Tokens known but not computed; 1 in a request that decodes: the last sampled one."""
        return self.prompt + self.produced - self.context

    @property
    def decodes(self) -> bool:
        return self.produced > 0 and self.left == 1

    def waiting_view(self, now: float, budget: int) -> RequestView:
        """Before the step is scheduled."""
        left = self.prompt + self.produced - self.context
        prefill = min(left, budget) if left > 1 or self.produced == 0 else 0
        return self._view(now, prefill, left - prefill if prefill else 0, self.proposed)

    def scheduled_view(self, now: float) -> RequestView:
        """In the step that was scheduled, before it ran."""
        known = self.scheduled - self.verified
        left = self.prompt + self.produced - self.context - known
        decodes = known == 1 and left == 0 and self.produced > 0
        return self._view(now, 0 if decodes else known, left, self.verified)

    def _view(self, now: float, prefill: int, left: int, proposed: int) -> RequestView:
        return RequestView(
            id=self.id,
            slo_class=self.slo_class,
            context_tokens=self.context,
            prefill_tokens=prefill,
            prefill_left=left,
            output_tokens=self.produced,
            remaining_tokens=self.output - self.produced,
            elapsed_s=now - self.first_token_at if self.produced else 0.0,
            proposed=proposed,
            drafter=self.drafter if proposed else None,
            draft_ready=self.drafted >= self.context,
            draft_hole=max(0, self.context - self.drafted),
        )

    def restart(self) -> None:
        """Preempted: its KV is gone, and what it produced is computed again."""
        self.context = self.blocks = self.scheduled = self.verified = self.proposed = self.asked = self.drafted = 0
        self.drafter = None
        self.preemptions += 1


class Finished(NamedTuple):
    """A request that got all its tokens. Times in seconds."""

    slo_class: str | None
    arrived_at: float
    ttft_s: float
    latency_s: float
    """From arrival to the last token."""
    output_tokens: int
    preemptions: int

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class KVCache:
    """Counts blocks; which block lies where does not matter without a prefix cache."""

    def __init__(self, tokens: int) -> None:
        self.blocks = self.free = tokens // BLOCK_TOKENS

    @property
    def free_tokens(self) -> int:
        return self.free * BLOCK_TOKENS

    def grow(self, request: Request, tokens: int) -> bool:
        """Room for `tokens` in all; False, and nothing taken, where there is none."""
        more = -(-tokens // BLOCK_TOKENS) - request.blocks
        if more > self.free:
            return False
        if more > 0:
            self.free -= more
            request.blocks += more
        return True

    def release(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = 0
