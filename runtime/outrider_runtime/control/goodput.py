"""lambda: the price of a second in tokens, from measured goodput."""

from __future__ import annotations

HALF_LIFE_STEPS = 40.0
PRIOR_TOKENS = 8.0


class Goodput:
    """EWMA of measured goodput, carried from one batch size to the next by the latency model.

    What is averaged is the ratio of measured tokens to those that plain decoding would have given in the same time at
    the same batch: it moves slowly where goodput itself jumps with the load, so lambda is right from the first step
    after a jump. Only steps without prefill count: every output token brings its share of prompt work along, whatever
    the draft length, and with that time in lambda a busy engine would look slow and speculation worthwhile just where
    it is not.
    """

    def __init__(self) -> None:
        self._keep = 0.5 ** (1.0 / HALF_LIFE_STEPS)
        self._tokens = self._plain_tokens = self._seconds = 0.0

    def observe(self, tokens: int, step_s: float, plain_rate: float) -> None:
        """`plain_rate`: modelled tokens per second of plain decoding at this step's batch."""
        self._tokens = self._keep * self._tokens + tokens
        self._plain_tokens = self._keep * self._plain_tokens + step_s * plain_rate
        self._seconds = self._keep * self._seconds + step_s

    def rate(self, plain_rate: float) -> float:
        """lambda in tokens per second at a batch of that plain rate."""
        return plain_rate * (self._tokens + PRIOR_TOKENS) / (self._plain_tokens + PRIOR_TOKENS)

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
