"""The time that an engine sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """In place of the module `time` where an engine reads it; the host itself takes no time."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    time = perf_counter = monotonic
