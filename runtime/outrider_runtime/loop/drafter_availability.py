"""Which drafters may run: none that was left out at the start, that the manifest pauses, or that failed a while ago."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from outrider_runtime.control.controller import Controller

FIRST_SUSPENSION_S = 30.0
LONGEST_SUSPENSION_S = 600.0
PAUSED = "paused in the manifest (draftPool[].paused)"


class Availability:
    """Tells the controller; whoever calls it from several threads holds a lock."""

    def __init__(
        self, controller: Controller, hosted: Iterable[str], left_out: Mapping[str, str], clock: Callable[[], float]
    ) -> None:
        """hosted: drafters that the controller knows. left_out: drafter -> why it never runs."""
        names = list(hosted)
        self._controller, self._clock = controller, clock
        self._serving = [name for name in names if name not in left_out]
        self._paused: frozenset[str] = frozenset()
        self._until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        for name in left_out.keys() & names:
            controller.suspend(name, left_out[name])

    @property
    def is_anybody_left(self) -> bool:
        """Some drafter that serves is not suspended."""
        return any(name not in self._until for name in self._serving)

    def suspend(self, drafter: str, reason: str) -> bool:
        """After a failure, longer each time. One that is suspended stays as it is: its step was under way when the
        first failure came in. Returns whether it ran until now."""
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
        """Lift a suspension now; the manifest's pause stays."""
        self._until.pop(drafter, None)
        if drafter not in self._serving:
            return
        if drafter in self._paused:
            self._controller.suspend(drafter, PAUSED)
        else:
            self._controller.resume(drafter)

    def resume_those_due(self) -> None:
        if self._until:
            now = self._clock()
            for drafter in [name for name, until in self._until.items() if now >= until]:
                self.resume(drafter)

    def pause(self, paused: frozenset[str]) -> None:
        """These are not asked until the manifest says otherwise."""
        changed, self._paused = paused ^ self._paused, paused
        for drafter in self._serving:
            if drafter in changed and drafter not in self._until:
                self.resume(drafter)
