"""What the latency model gets wrong about steps of one kind, in seconds, learned while serving.

The online correction of the whole target (`latency.py`) cancels where two kinds of step are compared, and the choice
is just such a comparison: next to the model's own error (several percent, more at the crossover) it misses what no
worker measures, such as the scheduler's time, which is longer in a step that verifies.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

HALF_LIFE_STEPS = 300.0
"""Of decoding steps of any kind, so that a kind that is not chosen gets another chance."""
KEPT = 0.5 ** (1 / HALF_LIFE_STEPS)
PRIOR_STEPS = 32.0
"""Of each of the four means: two steps that agree explain a fifth of what they say, a hundred nearly all of it."""
PRIOR_PROMPTS = 8.0
MOST_SHARE = 0.5
"""Of the predicted time, that one step may deviate by: the rest is an accident."""
LEAST_PROMPT_FACTOR, MOST_PROMPT_FACTOR = 0.5, 3.0
"""Of what the model says, that one prompt may lengthen a step by."""


class StepKind(Enum):
    PLAIN = 0
    """Nothing is verified."""
    EVEN = 1
    """Equally many proposals for every request."""
    RAGGED = 2


SIZES = 16
"""Sizes of a batch by their power of two; the last one holds all that are larger."""


class Deviations:
    """What all steps share, what a size of batch adds (by its power of two), what a kind of step adds, and what the two
    together do; each a mean that is shrunk to none.

    What a size shares is known from the kinds that were seen there, and what a kind shares from the sizes that it was
    seen at. Were a kind's mean all that is known of it at a size where it was not seen yet, it would look cheap there
    for being seen where the model is right: under overload, where plain steps are all that there is, verifying did.
    """

    def __init__(self) -> None:
        self._weights = np.zeros((len(StepKind), SIZES))
        self._totals = np.zeros_like(self._weights)
        self._expected: NDArray[np.float64] | None = None

    def observe(self, kind: StepKind, requests: int, seconds: float, predicted_s: float) -> None:
        """A decoding step's time without its drafts, and what the model says of it."""
        most = MOST_SHARE * predicted_s
        self._weights *= KEPT
        self._totals *= KEPT
        self._weights[_cell(kind, requests)] += 1
        self._totals[_cell(kind, requests)] += min(max(seconds - predicted_s, -most), most)
        self._expected = None

    def seconds(self, kind: StepKind, requests: int) -> float:
        """To be added to the model's prediction."""
        if self._expected is None:
            self._expected = self._fitted()
        return float(self._expected[_cell(kind, requests)])

    def _fitted(self) -> NDArray[np.float64]:
        """(kinds, sizes). What is explained by the wider mean is not counted again in the narrower one."""
        expected = np.zeros_like(self._weights)
        for axes in ((0, 1), (0,), (1,), ()):
            left = (self._totals - self._weights * expected).sum(axis=axes, keepdims=True)
            expected = expected + left / (self._weights.sum(axis=axes, keepdims=True) + PRIOR_STEPS)
        return expected


def _cell(kind: StepKind, requests: int) -> tuple[int, int]:
    return kind.value, min(requests.bit_length(), SIZES - 1)


class PromptTimes:
    """How much longer prompts make a step than the model says: a ratio of means, shrunk to 1."""

    def __init__(self) -> None:
        self._weight = self._seconds = self._predicted_s = 0.0

    def observe(self, seconds: float, predicted_s: float) -> None:
        """By what a step was longer than one that reads no prompt."""
        self._weight = KEPT * self._weight + 1
        least, most = LEAST_PROMPT_FACTOR * predicted_s, MOST_PROMPT_FACTOR * predicted_s
        self._seconds = KEPT * self._seconds + min(max(seconds, least), most)
        self._predicted_s = KEPT * self._predicted_s + predicted_s

    @property
    def factor(self) -> float:
        if self._predicted_s <= 0:
            return 1.0
        prior_s = PRIOR_PROMPTS * self._predicted_s / self._weight
        return (self._seconds + prior_s) / (self._predicted_s + prior_s)
