"""Slots of running requests: the row of a request in all arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from outrider_runtime.control.batch import Ints

SLOTS_PER_REQUEST = 2
"""Enough that a slot's last step is over before the slot is used again."""


class Slots:
    """Assigns slots. A slot is free again once the last step of its request is over."""

    def __init__(self, count: int) -> None:
        """count: at least the number of concurrent requests; with twice as many, no slot is reused early."""
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[str, int] = {}
        self._leaving: deque[tuple[int, int]] = deque()
        """(last step, slot), the oldest first."""
        self.early: list[int] = []
        """Slots that were reused before their last step was over; the reader clears the list."""

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __len__(self) -> int:
        """Requests that have a slot."""
        return len(self._of)

    def get(self, name: str) -> int | None:
        return self._of.get(name)

    def of(self, names: Iterable[str]) -> Ints:
        """(N,): slots of requests that have one."""
        of = self._of
        return np.array([of[name] for name in names], np.int64)

    def take(self, name: str) -> int:
        """Assign a slot to a request that has none. Raises IndexError if more requests run than there are slots."""
        if not self._free:
            _, slot = self._leaving.popleft()
            self.early.append(slot)
            self._free.append(slot)
        self._of[name] = self._free.pop()
        return self._of[name]

    def leave(self, name: str, last_step: int) -> None:
        """Release the slot of a request that ends or is preempted. last_step: the last step that was scheduled."""
        slot = self._of.pop(name, None)
        if slot is not None:
            self._leaving.append((last_step, slot))

    def over(self, before: int) -> list[int]:
        """Return the slots that become free now that all steps with a number below `before` are over."""
        freed = []
        while self._leaving and self._leaving[0][0] < before:
            freed.append(self._leaving.popleft()[1])
        self._free += freed
        return freed
