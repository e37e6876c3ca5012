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


_Group = tuple[StepKind | None, int | None]
"""Kind and size; None: any."""


class Deviations:
    """A mean for each kind of step and size of batch (its power of two), shrunk to the kind's mean at other sizes, that
    to the mean of other kinds, and that to none.

    Under a load that changes each size is there for some steps only. And what all kinds share must not count for those
    alone that were seen, or the others would look cheap.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._means: dict[_Group, tuple[float, float, int]] = {}  # weight, sum, last step

    def observe(self, kind: StepKind, requests: int, seconds: float, predicted_s: float) -> None:
        """A decoding step's time without its drafts, and what the model says of it."""
        self._steps += 1
        most = MOST_SHARE * predicted_s
        deviation = min(max(seconds - predicted_s, -most), most)
        for group in _groups(kind, requests):
            weight, total = self._faded(group)
            self._means[group] = weight + 1, total + deviation, self._steps

    def seconds(self, kind: StepKind, requests: int) -> float:
        """To be added to the model's prediction."""
        mean = 0.0
        groups = [self._faded(group) for group in _groups(kind, requests)]
        for (weight, total), (inner_weight, inner_total) in zip(groups, [*groups[1:], (0.0, 0.0)], strict=True):
            mean = (total - inner_total + PRIOR_STEPS * mean) / (weight - inner_weight + PRIOR_STEPS)
        return mean

    def _faded(self, group: _Group) -> tuple[float, float]:
        weight, total, last = self._means.get(group, (0.0, 0.0, 0))
        keep = 0.5 ** ((self._steps - last) / HALF_LIFE_STEPS)
        return keep * weight, keep * total


def _groups(kind: StepKind, requests: int) -> list[_Group]:
    """The widest first; each holds the next."""
    return [(None, None), (kind, None), (kind, requests.bit_length())]


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
