"""Exponential back-off with jitter."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Pauses that double from `first_s` to `longest_s` until a success resets them.

    Each pause is shortened by up to a half at random, so that attempts that failed together do not retry together.
    """

    def __init__(self, first_s: float, longest_s: float, chance: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._chance = chance
        self._next_s = first_s

    def next_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(self._longest_s, 2 * pause_s)
        return pause_s * (1 - self._chance() / 2)

    def reset(self) -> None:
        self._next_s = self._first_s
