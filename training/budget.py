"""What a training may take, and the line that reports how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

VOCABULARY_TOKENS = 8_000  # of answers seen before the draft vocabulary is chosen
LAST_WRITING = 0.9  # share of the budget after which no more answers are written: the rest of it anneals
PROGRESS_S = 10.0


@dataclass(frozen=True)
class Budget:
    """What training may take; whichever ends first. None: no bound."""

    minutes: float | None = None
    answers: int | None = None
    steps: int | None = None

    def spent(self, minutes: float, answers: float, steps: int) -> float:
        """Share of the budget, 1 at its end."""
        pairs = ((minutes, self.minutes), (answers, self.answers), (steps, self.steps))
        return min(1.0, max(used / bound for used, bound in pairs if bound))


@dataclass
class Progress:
    """What is done, and a line about it every ten seconds. An answer that was written is used up over its passes."""

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

    def spent(self) -> float:
        return self.budget.spent((self.clock() - self.started_s) / 60, self.used, self.steps)

    def room(self, batch: int) -> int:
        """How many answers to write next."""
        if self.answers and self.spent() >= LAST_WRITING:
            return 0
        return min(batch, self.budget.answers - self.answers) if self.budget.answers else batch

    def knows_vocabulary(self) -> bool:
        """Enough answers, or as many as the budget has room for."""
        return self.tokens >= VOCABULARY_TOKENS or self.spent() > 0.5 or not self.room(1)

    def tick(self) -> None:
        time_s = self.clock()
        if time_s - self.printed_s < PROGRESS_S:
            return
        self.printed_s = time_s
        share = self.spent()
        left = (time_s - self.started_s) * (1 / share - 1) if share else math.inf
        eta = f"{left / 60:.1f} min" if math.isfinite(left) else "unknown"
        say(
            f"{share:4.0%}  answers {self.answers}  tokens {self.tokens}  steps {self.steps}  "
            f"loss {'-' if math.isnan(self.loss) else format(self.loss, '.3f')}  ETA {eta}"
        )


def say(line: str) -> None:
    print(line, flush=True)
