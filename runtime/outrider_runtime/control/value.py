"""The one place that weighs gain against cost: `E[tokens] - lambda * T_step` (TurboSpec eq. 1, made additive).

`Price` says what a step takes, by the number of proposals in it; every choice is an argmax of `worth` over one of its
tables. lambda is the goodput, measured. N decoding requests, T the most proposals that are looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.compiled import compilable, compiled
from outrider_runtime.control.data.batch import Floats

HALF_LIFE_STEPS = 40
KEPT = 0.5 ** (1 / HALF_LIFE_STEPS)
"""Weight of older measurements after each step."""
PRIOR_TOKENS = 8.0

WHOLE_BATCH: Floats = np.zeros((0, 0))
"""Stands for what requests add to drafters' passes: nothing, as every pass is over the whole batch."""


@compilable
def worth(tokens: float, seconds: float, rate: float) -> float:
    """What `tokens` that reach users are worth beyond the `seconds` that they take; `rate` is lambda, tokens/s."""
    return tokens - rate * seconds


class Price(NamedTuple):
    """The step that is priced, without drafts."""

    varlen_s: Floats
    """(T+1,): seconds of the target's pass with 0, 1, .. T proposals of unequal lengths; [0] is plain decoding."""
    uniform_s: Floats
    """(T+1,): mean seconds if every request verifies equally many, unless a prompt joins the step; `varlen_s` if no
    such step is possible. For one request both are equal."""
    node_s: Floats
    """(N,): what a node costs beyond that: for its request's context, and in the next first pass of the drafters."""
    rate: float
    """lambda, tokens per second."""
    token_s: float
    """What one proposal more costs the target at first."""

    @property
    def plain_s(self) -> float:
        return float(self.varlen_s[0])


@compiled
def expected_s(seconds: Floats, tokens: float, p_no_proposal: float) -> float:
    """Mean seconds of a step that is plain with probability `p_no_proposal` and holds `tokens` on average."""
    if p_no_proposal >= 1.0 or tokens <= 0.0:
        return float(seconds[0])
    if_any = max(1.0, tokens / (1.0 - p_no_proposal))
    whole = min(int(if_any), len(seconds) - 1)
    after = min(whole + 1, len(seconds) - 1)
    verifies = seconds[whole] + (if_any - whole) * (seconds[after] - seconds[whole])
    return float(p_no_proposal * seconds[0] + (1.0 - p_no_proposal) * verifies)


class Goodput:
    """Measured goodput, carried from one batch size to the next by the latency model.

    What is averaged is the ratio of measured tokens to those that plain decoding would have given in the same time at
    the same batch: it moves slowly where goodput itself jumps with the load, so lambda is right from the first step
    after a jump. Prompt work counts for nothing: every output token brings its share of it along, whatever the draft
    length, and with that time in lambda a busy engine would look slow and speculation worthwhile just where it is not.
    So steps without prefill count; steps with prefill, less what the model says that their prompts take, only where
    there have been no others for a while.
    """

    def __init__(self) -> None:
        self._tokens = self._plain_tokens = 0.0
        self._prefill_run = 0
        """Steps in a row that held a prompt."""

    def observe(self, tokens: float, step_s: float, plain_rate: float, *, prefill: bool = False) -> None:
        """`plain_rate`: modelled tokens per second of plain decoding at this step's batch. prefill: the step held a
        prompt; tokens and seconds are those of decoding alone."""
        self._prefill_run = self._prefill_run + 1 if prefill else 0
        if prefill and self._prefill_run <= HALF_LIFE_STEPS:
            return
        self._tokens = KEPT * self._tokens + tokens
        self._plain_tokens = KEPT * self._plain_tokens + step_s * plain_rate

    @property
    def ratio(self) -> float:
        """lambda by the modelled goodput of plain decoding at the same batch."""
        return (self._tokens + PRIOR_TOKENS) / (self._plain_tokens + PRIOR_TOKENS)
