"""The draft-prefill gate (TurboSpec, section 4.2): under load the neural draft's forward does not run at all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.costs import Shape
from outrider_runtime.control.goodput import Goodput
from outrider_runtime.control.latency import OnlineLatency

HOLD_STEPS = 8
"""Decisions in a row before the gate closes: a hole in the draft's KV costs a forward to close."""
REOPEN_LOOKS = 2
"""Looks in a row that find the draft worth running before a closed gate opens."""
REOPEN_SHARE = 0.8
"""Below this share of the threshold the first such look opens it."""
WINDOW_STEPS = 24
"""How long a closed gate may let one new request through: its prompt, then a block of exploration. TurboSpec resets
the threshold every RESETSTEPS; here the explorer says when, as it knows what that may cost."""


class DraftGate:
    """Remembers the batch size at which the neural draft stopped to pay."""

    def __init__(self) -> None:
        self.threshold = math.inf
        self._idle = 0
        self._wanted = 0
        self._window = 0

    def update(self, requests: int, worth: bool) -> None:
        """One look of the closed loop, not of a probe or a block of exploration. `worth`: the neural draft would be
        used at this batch if its KV were whole for every request."""
        self._idle = 0 if worth else self._idle + 1
        self._wanted = self._wanted + 1 if worth else 0
        if self._idle >= HOLD_STEPS:
            self.threshold = min(self.threshold, float(requests))
        elif self._wanted >= REOPEN_LOOKS or (worth and requests < REOPEN_SHARE * self.threshold):
            self.threshold = math.inf

    def step(self) -> None:
        """One decision of the closed loop."""
        self._window = max(0, self._window - 1)

    def closed(self, requests: int) -> bool:
        """Whether the draft's prefill and every other draft forward is skipped at this batch."""
        return requests >= self.threshold and self._window == 0

    @property
    def window(self) -> bool:
        """A closed gate lets a new request through."""
        return self._window > 0

    def let_through(self) -> None:
        self._window = WINDOW_STEPS

    def shut(self) -> None:
        self._window = 0


def pays_for(
    requests: int, context_tokens: float, path: NDArray[np.floating[Any]], neural: str, latency: OnlineLatency,
    goodput: Goodput,
) -> bool:  # fmt: skip
    """Whether the neural draft would be worth running once so many requests decode, each with so much context.

    TurboSpec's threshold is met in decoding, when the prompts of a crowd have been through the draft already; this is
    asked before. path: (K,), products of the draft's hazards.
    """
    context = requests * context_tokens
    shape = Shape(context, requests, requests, context / 1000)
    price = latency.price(shape, uniform=True)
    plain_s = price.plain_s()
    if plain_s <= 0:
        return True  # no cost is known yet
    rate = goodput.rate(requests / plain_s)
    tokens = requests * np.arange(1.0, len(path) + 1)  # (K,), every request verifies as many
    seconds = price.uniform_s(tokens) - plain_s + tokens * latency.draft_token_s(neural, requests)
    seconds += [latency.draft_s(neural, shape, length) for length in range(1, len(path) + 1)]
    return bool((requests * path.cumsum() > rate * seconds).any())
