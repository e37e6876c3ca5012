"""The virtual clock of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Replaces the module `time` in an engine; the host itself takes no time."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s

    time = perf_counter = monotonic
