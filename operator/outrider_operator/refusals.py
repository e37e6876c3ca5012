"""What the API server refused, and when it is worth asking again: a quota may be raised, a policy changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider_operator.model import Rejection

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
PATIENCE = 5
"""Rounds in a row that the API server may be too busy for, before that is a refusal as any other."""


@dataclass(frozen=True)
class _Refusal:
    rejection: Rejection
    pause_s: float
    due_at: float


class Refusals:
    """Of one generation of one service. A write that keeps being refused is tried again after longer and longer."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._refusals: dict[str, _Refusal] = {}
        self._postponed = 0

    @property
    def patient(self) -> bool:
        """Is a busy API server to be waited for, without a word?"""
        return self._postponed < PATIENCE

    def in_force(self, now: float) -> tuple[Rejection, ...]:
        """The refusals that are not due to be tried again."""
        return tuple(each.rejection for each in self._refusals.values() if each.due_at > now)

    def postpone(self) -> None:
        """The API server was too busy."""
        self._postponed += 1

    def note(self, refused: Sequence[Rejection], now: float, *, all_tried: bool = True) -> None:
        """`refused` are the writes that were refused (again); with `all_tried` no other one that was due is."""
        kept = {write: each for write, each in self._refusals.items() if each.due_at > now or not all_tried}
        if all_tried and not refused:
            self._postponed = 0
        for rejection in refused:
            before = self._refusals.get(rejection.write)
            pause_s = min(LONGEST_PAUSE_S, 2 * before.pause_s) if before is not None else FIRST_PAUSE_S
            kept[rejection.write] = _Refusal(rejection, pause_s, now + pause_s)
        self._refusals = kept

    def due_in_s(self, now: float) -> float | None:
        """Seconds until the next one is due."""
        return min((each.due_at - now for each in self._refusals.values()), default=None)
