"""How often steps hold prompts that the batch before them did not: their lengths are unequal, whatever was planned."""

from __future__ import annotations

from outrider_runtime.control.value import KEPT


class FreshPrompts:
    """Share of steps that hold prompts, among those before which no prompt was left unread."""

    def __init__(self) -> None:
        self.share, self._read_on = 0.0, False

    def observe(self, prompts: bool, *, read_on: bool) -> None:
        """prompts: the step held some. read_on: it left some for the next one."""
        if not self._read_on:
            self.share += (1.0 - KEPT) * (prompts - self.share)
        self._read_on = read_on
