"""What happened over a run, step by step: totals, and a coarse timeline for the plot."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_runtime.control.batch import StepOutcome

BINS = 120


@dataclass(slots=True)
class Slice:
    """Sums over the steps that ended in one stretch of time."""

    busy_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    request_seconds: float = 0.0
    decoding: int = 0
    """(request, step) pairs that decoded."""
    verified: int = 0

    @property
    def batch(self) -> float:
        """Requests in the engine's steps, by time."""
        return self.request_seconds / self.busy_s if self.busy_s else 0.0

    @property
    def verified_length(self) -> float:
        """Proposals that the target scored for a request in a step."""
        return self.verified / self.decoding if self.decoding else 0.0


@dataclass(slots=True)
class Observer:
    """Called with each step."""

    bin_s: float
    total: Slice = field(default_factory=Slice)
    timeline: list[Slice] = field(default_factory=list)
    drafter_steps: dict[str, int] = field(default_factory=dict)
    """(request, step) pairs that verified a drafter's proposals."""

    def __call__(self, outcome: StepOutcome) -> None:
        decoding = outcome.n_decoding
        verified = outcome.n_batched - outcome.prefill_tokens - decoding
        position = int(outcome.now / self.bin_s)
        while len(self.timeline) <= position:
            self.timeline.append(Slice())
        for one in (self.total, self.timeline[position]):
            one.busy_s += outcome.step_s
            one.steps += 1
            one.tokens += outcome.tokens
            one.request_seconds += outcome.step_s * outcome.n_requests
            one.decoding += decoding
            one.verified += verified
        if verified:
            for request in outcome.requests:
                if request.verified and request.drafter is not None:
                    self.drafter_steps[request.drafter] = self.drafter_steps.get(request.drafter, 0) + 1
