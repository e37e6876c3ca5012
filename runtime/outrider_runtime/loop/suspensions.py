"""Drafters that failed do not run for a while, longer each time."""

from __future__ import annotations

from collections.abc import Callable

FIRST_SUSPENSION_S = 30.0
LONGEST_SUSPENSION_S = 600.0


class Suspensions:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def __contains__(self, drafter: str) -> bool:
        return drafter in self._until

    def begin(self, drafter: str) -> float | None:
        """Seconds that it is suspended for from now on; None for one that is: its step was under way when the first
        failure came in."""
        if drafter in self._until:
            return None
        again = self._count.get(drafter, 0)
        pause_s = min(LONGEST_SUSPENSION_S, FIRST_SUSPENSION_S * 2.0**again)
        self._count[drafter] = again + 1
        self._until[drafter] = self._clock() + pause_s
        return pause_s

    def end(self, drafter: str) -> None:
        self._until.pop(drafter, None)

    def over(self) -> list[str]:
        """Drafters whose suspension has ended; each is named once."""
        if not self._until:
            return []
        now = self._clock()
        ended = [drafter for drafter, until in self._until.items() if now >= until]
        for drafter in ended:
            del self._until[drafter]
        return ended
