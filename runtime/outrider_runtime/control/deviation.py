"""What the latency model gets wrong about steps of one kind, in seconds, learned while serving.

The online correction of the whole target (`latency.py`) cancels where two kinds of step are compared, and the choice
is just such a comparison: next to the model's own error (several percent, more at the crossover) it misses what no
worker measures, such as the scheduler's time, which is longer in a step that verifies.
"""

from __future__ import annotations

from enum import Enum

HALF_LIFE_STEPS = 300.0
"""Of decoding steps of any kind, so that a kind that is not chosen gets another chance."""
PRIOR_STEPS = 8.0
ANY_SIZE = -1
MOST_SHARE = 0.5
"""Of the predicted time, that one step may deviate by: the rest is an accident."""
LEAST_PROMPT_FACTOR, MOST_PROMPT_FACTOR = 0.5, 3.0
"""Of what the model says, that one prompt may lengthen a step by."""


class StepKind(Enum):
    PLAIN = "plain"
    """Nothing is verified."""
    EVEN = "even"
    """Equally many proposals for every request."""
    RAGGED = "ragged"


class Deviations:
    """A mean for each kind of step and size of batch (its power of two), shrunk to the kind's mean at other sizes, and
    that to none: under a load that changes each size is there for some steps only."""

    def __init__(self) -> None:
        self._steps = 0
        self._means: dict[tuple[StepKind, int], tuple[float, float, int]] = {}  # weight, sum, last step

    def observe(self, kind: StepKind, requests: int, seconds: float, predicted_s: float) -> None:
        """A decoding step's time without its drafts, and what the model says of it."""
        self._steps += 1
        most = MOST_SHARE * predicted_s
        deviation = min(max(seconds - predicted_s, -most), most)
        for size in (requests.bit_length(), ANY_SIZE):
            weight, total = self._faded(kind, size)
            self._means[kind, size] = weight + 1, total + deviation, self._steps

    def seconds(self, kind: StepKind, requests: int) -> float:
        """To be added to the model's prediction."""
        weight, total = self._faded(kind, requests.bit_length())
        weight_of_all, total_of_all = self._faded(kind, ANY_SIZE)
        elsewhere = (total_of_all - total) / (weight_of_all - weight + PRIOR_STEPS)
        return (total + PRIOR_STEPS * elsewhere) / (weight + PRIOR_STEPS)

    def _faded(self, kind: StepKind, size: int) -> tuple[float, float]:
        weight, total, last = self._means.get((kind, size), (0.0, 0.0, 0))
        keep = 0.5 ** ((self._steps - last) / HALF_LIFE_STEPS)
        return keep * weight, keep * total


class PromptTimes:
    """How much longer prompts make a step than the model says: a ratio of means, shrunk to 1."""

    def __init__(self) -> None:
        self._weight = self._seconds = self._predicted_s = 0.0

    def observe(self, seconds: float, predicted_s: float) -> None:
        """By what a step was longer than one that reads no prompt."""
        keep = 0.5 ** (1 / HALF_LIFE_STEPS)
        self._weight = keep * self._weight + 1
        least, most = LEAST_PROMPT_FACTOR * predicted_s, MOST_PROMPT_FACTOR * predicted_s
        self._seconds = keep * self._seconds + min(max(seconds, least), most)
        self._predicted_s = keep * self._predicted_s + predicted_s

    @property
    def factor(self) -> float:
        if self._predicted_s <= 0:
            return 1.0
        prior_s = PRIOR_STEPS * self._predicted_s / self._weight
        return (self._seconds + prior_s) / (self._predicted_s + prior_s)
