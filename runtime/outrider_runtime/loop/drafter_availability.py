"""Drafters that may run: loaded at the start, not paused in the manifest, and not suspended after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from outrider_runtime.control.controller import Controller

FIRST_SUSPENSION_S = 30.0
"""Length of a drafter's first suspension; each later one is twice as long."""
LONGEST_SUSPENSION_S = 600.0
PAUSED = "paused in the manifest (draftPool[].paused)"


class Availability:
    """Suspends and resumes drafters in the controller. Not thread-safe: callers hold a lock."""

    def __init__(
        self, controller: Controller, hosted: Iterable[str], left_out: Mapping[str, str], clock: Callable[[], float]
    ) -> None:
        """hosted: names of the controller's drafters. left_out: drafters that never run, with the reason."""
        names = list(hosted)
        self._controller, self._clock = controller, clock
        self._serving = [name for name in names if name not in left_out]
        self._paused: frozenset[str] = frozenset()
        self._until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        for name in left_out.keys() & names:
            controller.suspend(name, left_out[name])

    @property
    def has_serving_drafter(self) -> bool:
        """Whether some loaded drafter is not suspended."""
        return any(name not in self._until for name in self._serving)

    def suspend(self, drafter: str, reason: str) -> bool:
        """Suspend a drafter after an error, longer each time. Returns whether it ran until now.

        A drafter that is suspended already stays as it is: the step was in flight when the first error arrived.
        """
        if drafter not in self._serving or drafter in self._until:
            return False
        failures = self._failures.get(drafter, 0)
        pause_s = min(LONGEST_SUSPENSION_S, FIRST_SUSPENSION_S * 2.0**failures)
        self._failures[drafter] = failures + 1
        self._until[drafter] = self._clock() + pause_s
        self._controller.suspend(drafter, f"suspended for {pause_s:.0f} s: {reason}")
        return True

    def suspend_all(self, reason: str) -> None:
        for name in self._serving:
            self.suspend(name, reason)

    def resume(self, drafter: str) -> None:
        """End a suspension now; a pause in the manifest stays in force."""
        self._until.pop(drafter, None)
        if drafter not in self._serving:
            return
        if drafter in self._paused:
            self._controller.suspend(drafter, PAUSED)
        else:
            self._controller.resume(drafter)

    def resume_those_due(self) -> None:
        if self._until:
            now_s = self._clock()
            for drafter in [name for name, until_s in self._until.items() if now_s >= until_s]:
                self.resume(drafter)

    def pause(self, paused: frozenset[str]) -> None:
        """Pause exactly these drafters, as the manifest says."""
        changed, self._paused = paused ^ self._paused, paused
        for drafter in self._serving:
            if drafter in changed and drafter not in self._until:
                self.resume(drafter)
