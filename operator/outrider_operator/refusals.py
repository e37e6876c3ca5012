"""Back-off for writes that the API server refused. A quota may be raised or a policy changed, so they are retried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider_operator.cluster_model import ApiRefusal

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
PATIENCE = 5
"""Attempts in a row that a busy API server may fail before that counts as a refusal."""


@dataclass(frozen=True)
class _PausedWrite:
    refusal: ApiRefusal
    pause_s: float
    due_at: float


class RefusalBackoff:
    """Refused writes of one generation of a service. Each refusal doubles the pause before the next attempt."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._paused: dict[str, _PausedWrite] = {}
        self._postponed = 0

    @property
    def patient(self) -> bool:
        """True while a busy API server is retried without reporting it."""
        return self._postponed < PATIENCE

    def in_force(self, at: float) -> tuple[ApiRefusal, ...]:
        """The refusals that are not due for another attempt."""
        return tuple(paused.refusal for paused in self._paused.values() if paused.due_at > at)

    def postpone(self) -> None:
        """Count one attempt for which the API server was too busy."""
        self._postponed += 1

    def note(self, refused: Sequence[ApiRefusal], at: float, *, all_tried: bool = True) -> None:
        """Record the writes that were refused. all_tried: every other write that was due has succeeded."""
        kept = {write: paused for write, paused in self._paused.items() if paused.due_at > at or not all_tried}
        if all_tried and not refused:
            self._postponed = 0
        for refusal in refused:
            before = self._paused.get(refusal.write)
            pause_s = min(LONGEST_PAUSE_S, 2 * before.pause_s) if before is not None else FIRST_PAUSE_S
            kept[refusal.write] = _PausedWrite(refusal, pause_s, at + pause_s)
        self._paused = kept

    def due_in_s(self, at: float) -> float | None:
        """Seconds until the next write is due; None without one."""
        return min((paused.due_at - at for paused in self._paused.values()), default=None)
