"""The budget of a training, and the line that reports its progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

VOCABULARY_TOKENS = 8_000  # of answers seen before the draft vocabulary is chosen
LAST_WRITING = (
    0.9  # share of the budget after which no answers are written: the learning rate falls on those that are there
)
PROGRESS_S = 10.0


@dataclass(frozen=True)
class Budget:
    """Bounds of a training, which ends at the first of them. None: no bound."""

    minutes: float | None = None
    answers: int | None = None
    steps: int | None = None

    def spent_share(self, minutes: float, answers: float, steps: int) -> float:
        """Return the spent share of the budget, 1 at its end."""
        pairs = ((minutes, self.minutes), (answers, self.answers), (steps, self.steps))
        return min(1.0, max(used / bound for used, bound in pairs if bound))


@dataclass
class Progress:
    """Counters of a training, and a line about them every ten seconds.

    `used` counts answers by passes: an answer is used up after the passes of its kind.
    """

    budget: Budget
    clock: Callable[[], float] = time.monotonic
    answers: int = 0
    used: float = 0.0
    tokens: int = 0
    steps: int = 0
    loss: float = math.nan
    started_s: float = field(init=False)
    printed_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.printed_s = self.clock()

    def spent_share(self) -> float:
        return self.budget.spent_share((self.clock() - self.started_s) / 60, self.used, self.steps)

    def room(self, batch: int) -> int:
        """Return how many answers to write next."""
        if self.answers and self.spent_share() >= LAST_WRITING:
            return 0
        return min(batch, self.budget.answers - self.answers) if self.budget.answers else batch

    def knows_vocabulary(self) -> bool:
        """Whether there are enough answers to choose the draft vocabulary, or no more will be written."""
        return self.tokens >= VOCABULARY_TOKENS or self.spent_share() > 0.5 or not self.room(1)

    def tick(self) -> None:
        time_s = self.clock()
        if time_s - self.printed_s < PROGRESS_S:
            return
        self.printed_s = time_s
        share = self.spent_share()
        left = (time_s - self.started_s) * (1 / share - 1) if share else math.inf
        eta = f"{left / 60:.1f} min" if math.isfinite(left) else "unknown"
        say(
            f"{share:4.0%}  answers {self.answers}  tokens {self.tokens}  steps {self.steps}  "
            f"loss {'-' if math.isnan(self.loss) else format(self.loss, '.3f')}  ETA {eta}"
        )


def say(line: str) -> None:
    print(line, flush=True)
