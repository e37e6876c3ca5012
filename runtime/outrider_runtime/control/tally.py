"""Counters since the start, and what the last steps looked like."""

from __future__ import annotations

import math
from collections.abc import Iterable

from outrider_runtime.control.batch import RequestOutcome, StepOutcome
from outrider_runtime.control.counters import DrafterCounters

RECENT_KEEP = 0.95
"""Per step: about the last 20 steps."""


class Tally:
    def __init__(self, drafters: Iterable[str], max_draft_tokens: int) -> None:
        self.steps = 0
        self.speculative_steps = 0
        self.output_tokens = 0
        self.busy_s = 0.0
        self.proposed_tokens = 0
        self.dropped_steps = 0
        self.caught_up_tokens = 0
        self.catch_up_s = 0.0
        self.draft_length_steps = [0] * (max_draft_tokens + 1)
        self.running = 0
        self.last_step_at = 0.0
        self.recent_length = 0.0
        self.recent_speculation = 0.0
        self.recent_users = dict.fromkeys(drafters, 0.0)
        self._drafters = {name: [0, 0, 0, 0] for name in self.recent_users}  # request steps, tried, verified, accepted

    def observe(self, outcome: StepOutcome) -> None:
        self.steps += 1
        self.output_tokens += outcome.tokens
        self.running = outcome.n_requests
        self.last_step_at = outcome.now
        if outcome.catch_up is not None:
            self.caught_up_tokens += outcome.catch_up.tokens
            seconds = outcome.catch_up.seconds
            self.catch_up_s += seconds if math.isfinite(seconds) else 0.0
        verified = sum(request.verified for request in outcome.requests)
        self.speculative_steps += verified > 0
        self.draft_length_steps[0] += outcome.n_decoding - len(outcome.requests)
        for request in outcome.requests:
            self._observe_request(request)
        if outcome.n_decoding:
            self._observe_recent(outcome, verified)

    def drafter(self, name: str) -> DrafterCounters:
        request_steps, tried, verified, accepted = self._drafters[name]
        return DrafterCounters(request_steps=request_steps, tried=tried, verified=verified, accepted=accepted)

    @property
    def favourite(self) -> str:
        """The drafter that most requests of the last steps used; empty for none."""
        name = max(self.recent_users, key=lambda one: self.recent_users[one], default="")
        return name if name and self.recent_users[name] > 0.05 else ""

    def _observe_request(self, request: RequestOutcome) -> None:
        self.proposed_tokens += request.proposed
        self.draft_length_steps[min(request.verified, len(self.draft_length_steps) - 1)] += 1
        counts = self._drafters.get(request.drafter or "")
        if counts is not None and request.verified > 0:
            counts[0] += 1
            counts[1] += request.tried
            counts[2] += request.verified
            counts[3] += request.accepted

    def _observe_recent(self, outcome: StepOutcome, verified: int) -> None:
        requests, fresh = outcome.n_decoding, 1 - RECENT_KEEP
        self.recent_length += fresh * (verified / requests - self.recent_length)
        self.recent_speculation += fresh * ((outcome.draft_plan.draft_tokens > 0) - self.recent_speculation)
        for name in self.recent_users:
            users = sum(request.drafter == name and request.verified > 0 for request in outcome.requests)
            self.recent_users[name] += fresh * (users / requests - self.recent_users[name])
