"""The one place that weighs gain against cost: `E[tokens] - lambda * T_step` (TurboSpec eq. 1, made additive).

`Price` says what a step takes, by the number of proposals in it; every choice is an argmax of `worth` over one of its
tables. N decoding requests, T the most proposals that are looked at.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_runtime.control.batch import Floats
from outrider_runtime.control.compiled import compiled


@compiled
def worth(tokens: float, seconds: float, rate: float) -> float:
    """What `tokens` that reach users are worth beyond the `seconds` that they take; `rate` is lambda, tokens/s."""
    return tokens - rate * seconds


class Price(NamedTuple):
    """The step that is priced, without drafts."""

    ragged_s: Floats
    """(T+1,): seconds of the target's pass with 0, 1, .. T proposals of unequal lengths; [0] is plain decoding."""
    uniform_s: Floats
    """(T+1,): the same where every request verifies equally many; infinite where no such step is possible."""
    node_s: Floats
    """(N,): what a node costs beyond that: for its request's context, and in the next first pass of the drafters."""
    rate: float
    """lambda, tokens per second."""
    token_s: float
    """What one proposal more costs the target at first."""
    error_s: float
    """Standard error of what the model says of a step that verifies against a plain one."""

    @property
    def plain_s(self) -> float:
        return float(self.ragged_s[0])

    def step_s(self, proposals: int) -> float:
        """Seconds with so many proposals, at most as many as the table holds."""
        return float(self.ragged_s[min(proposals, len(self.ragged_s) - 1)])
