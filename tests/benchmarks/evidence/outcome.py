"""What came of a point's requests."""

from __future__ import annotations

from dataclasses import dataclass


class PointFailedError(RuntimeError):
    """Requests of a point failed; the message holds the first error."""


@dataclass(frozen=True)
class Outcome:
    """What one request's user saw. Seconds."""

    phase: str
    slo_class: str
    latency_s: float
    """From when it was due (or had a place) to its last token."""
    ttft_s: float
    tokens: int
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """The field's definition: never an average over streamed chunks, which carry many tokens each."""
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Sent:
    """A point, sent."""

    seconds: float
    """From the first request to the last answer."""
    outcomes: tuple[Outcome, ...]

    def checked(self, name: str) -> Sent:
        """Itself. Raises PointFailedError where a request of the point failed or brought nothing."""
        failed = [one.error for one in self.outcomes if one.error or not one.tokens]
        if failed:
            raise PointFailedError(f"{name}: {len(failed)} of {len(self.outcomes)} requests failed: {failed[0]}")
        return self
