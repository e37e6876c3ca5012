"""The draft-prefill gate (TurboSpec, section 4.2): under load the neural draft's forward does not run at all."""

from __future__ import annotations

import math

HOLD_STEPS = 8
"""Decisions in a row before the gate moves: a hole in the draft's KV lasts as long as its request."""
REOPEN_SHARE = 0.8
"""Below this share of the threshold the gate opens."""
RESET_STEPS = 800
"""Every so many steps a closed gate opens for a new request, or it would never learn that traffic has changed."""
WINDOW_STEPS = 16
"""How long it opens then: time for that request's prompt and for one block of exploration."""


class DraftGate:
    """Remembers the batch size at which the neural draft stopped to pay."""

    def __init__(self) -> None:
        self.threshold = math.inf
        self._idle = 0
        self._wanted = 0
        self._closed_steps = 0
        self._window = 0

    def update(self, requests: int, worth: bool) -> None:
        """One decision of the closed loop, not of a probe or a block of exploration. `worth`: the neural draft would
        be used at this batch if its KV were whole for every request."""
        self._idle = 0 if worth else self._idle + 1
        self._wanted = self._wanted + 1 if worth else 0
        if self._idle >= HOLD_STEPS:
            self.threshold = min(self.threshold, float(requests))
        elif self._wanted >= HOLD_STEPS:
            self.threshold = math.inf
        if worth and requests < REOPEN_SHARE * self.threshold:
            self.threshold = math.inf
        self._closed_steps = self._closed_steps + 1 if self.closed(requests) else 0
        self._window = max(0, self._window - 1)

    def closed(self, requests: int) -> bool:
        """Whether the draft's prefill and every other draft forward is skipped at this batch."""
        return requests >= self.threshold and self._window == 0

    def new_request(self) -> None:
        """A prompt starts; every RESET_STEPS one of them goes through the draft although the gate is closed."""
        if self._closed_steps >= RESET_STEPS:
            self._window = WINDOW_STEPS
