"""Numbers for requests that run: what is known of a request is kept in arrays, by its slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from outrider_runtime.control.data.batch import Ints

SLOTS_PER_REQUEST = 2
"""So that a slot is not given again before the last step of the request that left it is over."""


class Slots:
    """A slot that a request left is given again once the last step that the request was in is over."""

    def __init__(self, count: int) -> None:
        """count: at least as many as there are requests that run at once. With twice as many none is given early."""
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[str, int] = {}
        self._leaving: deque[tuple[int, int]] = deque()
        """(last step, slot), the oldest first."""
        self.early: list[int] = []
        """Slots that had to be given before their last step was over; whoever reads them, clears them."""

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __len__(self) -> int:
        """Requests that have one."""
        return len(self._of)

    def get(self, name: str) -> int | None:
        return self._of.get(name)

    def of(self, names: Iterable[str]) -> Ints:
        """(N,) slots of requests that have one."""
        of = self._of
        return np.array([of[name] for name in names], np.int64)

    def take(self, name: str) -> int:
        """A slot for a request that has none. Raises IndexError where more requests run than there are slots."""
        if not self._free:
            _, slot = self._leaving.popleft()
            self.early.append(slot)
            self._free.append(slot)
        self._of[name] = self._free.pop()
        return self._of[name]

    def leave(self, name: str, last_step: int) -> None:
        """The request ends, or is preempted; `last_step`: the last one that was scheduled."""
        slot = self._of.pop(name, None)
        if slot is not None:
            self._leaving.append((last_step, slot))

    def over(self, before: int) -> list[int]:
        """Slots that are free from now on: all steps below `before` are over."""
        freed = []
        while self._leaving and self._leaving[0][0] < before:
            freed.append(self._leaving.popleft()[1])
        self._free += freed
        return freed
