"""The one place that weighs gain against cost: `E[tokens] - lambda * T_step` (TurboSpec eq. 1, made additive).

`Price` holds the seconds of a step by the number of its proposals; every choice is an argmax of `worth` over one of its
tables. lambda is the measured goodput. N decoding requests, T the largest number of proposals considered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Floats
from outrider_runtime.control.compiled import compilable, compiled

HALF_LIFE_STEPS = 40
DECAY_PER_STEP = 0.5 ** (1 / HALF_LIFE_STEPS)
"""Factor on the weight of older measurements at each step."""
PRIOR_TOKENS = 8.0
"""Tokens that the prior, goodput / plain goodput = 1, counts for."""

NO_SECONDS: Floats = np.zeros((0, 0))
"""Stands for seconds of drafters and requests (D, N) that are all 0."""


@compilable
def worth(tokens: float, seconds: float, rate: float) -> float:
    """Worth of `tokens` that reach users, less the `seconds` that they take, in tokens. rate: lambda, tokens/s."""
    return tokens - rate * seconds


class Price(NamedTuple):
    """Seconds of a step's target pass, by the number of its proposals."""

    target_s: Floats
    """(T+1,): seconds with 0, 1, .. T proposals; [0] is plain decoding."""
    node_s: Floats
    """(N,): seconds of a node beyond these: for its request's context, and in the drafters' next first passes."""
    rate: float
    """lambda, tokens per second."""
    token_s: float
    """Seconds of the first proposal."""

    @property
    def plain_s(self) -> float:
        return float(self.target_s[0])


@compiled
def expected_s(seconds: Floats, tokens: float, p_no_proposal: float) -> float:
    """Mean seconds of a step that has no proposal with probability `p_no_proposal`, and `tokens` of them on average.

    seconds: (T+1,), by the number of proposals; `(1 - p) * seconds[tokens / (1 - p)] + p * seconds[0]`.
    """
    if p_no_proposal >= 1.0 or tokens <= 0.0:
        return float(seconds[0])
    if_any = max(1.0, tokens / (1.0 - p_no_proposal))
    whole = min(int(if_any), len(seconds) - 1)
    after = min(whole + 1, len(seconds) - 1)
    verifies = seconds[whole] + (if_any - whole) * (seconds[after] - seconds[whole])
    return float(p_no_proposal * seconds[0] + (1.0 - p_no_proposal) * verifies)


class Goodput:
    """Measured goodput / modelled goodput of plain decoding at the same batch, a decaying mean.

    This ratio changes slowly, while goodput itself jumps with the load: so lambda is right from the first step after a
    jump. Prefill time is left out. Every output token needs its share of prefill, whatever the draft length; with that
    time in it, lambda would be too low on a busy engine, and the loop would speculate where it should not. So only
    steps without prefill count. If there have been none for a while, steps with prefill count, too, less the modelled
    time of their prompts."""

    def __init__(self) -> None:
        self._tokens = self._plain_tokens = 0.0
        self._prefill_run = 0
        """Steps in a row that held prompt tokens."""

    def observe(self, tokens: float, step_s: float, plain_rate: float, *, prefill: bool = False) -> None:
        """Count a step. plain_rate: modelled goodput of plain decoding at its batch, tokens/s. prefill: the step held
        prompt tokens; `tokens` and `step_s` are those of decoding alone."""
        self._prefill_run = self._prefill_run + 1 if prefill else 0
        if prefill and self._prefill_run <= HALF_LIFE_STEPS:
            return
        self._tokens = DECAY_PER_STEP * self._tokens + tokens
        self._plain_tokens = DECAY_PER_STEP * self._plain_tokens + step_s * plain_rate

    @property
    def ratio(self) -> float:
        """lambda / modelled goodput of plain decoding at the same batch."""
        return (self._tokens + PRIOR_TOKENS) / (self._plain_tokens + PRIOR_TOKENS)
