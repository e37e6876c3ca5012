"""Bounded exploration: short blocks with a drafter that the choice passes over, so that a change is noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import Purpose, StepOutcome
from outrider_runtime.control.drafting import DraftProblem

INTERVAL_STEPS = 150
EAGER_INTERVAL_STEPS = 4
POSTPONE_STEPS = 16
LOSS_SHARE = 0.01
"""Of busy time that blocks may cost over going on as before."""
FIRST_CREDIT_S = 0.05
MOST_CREDIT_S = 0.25
BLOCK_STEPS = 4
BLOCK_STEPS_FEW = 8
"""With few requests a step brings few trials."""
FEW_REQUESTS = 4
BLOCK_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Block:
    drafter: int
    draft_tokens: int


class Explorer:
    """Keeps the account of what exploring cost, and says when a block may start."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._since = 0
        self._left = 0
        self._block: Block | None = None
        self._credit_s = FIRST_CREDIT_S

    def due(self, *, eager: bool = False) -> bool:
        """A block may start: the interval is over and its cost is earned. `eager`: some drafter is hardly known."""
        interval = EAGER_INTERVAL_STEPS if eager else INTERVAL_STEPS
        return self._left == 0 and self._since >= interval and self._credit_s > 0

    def start(self, drafter: int, requests: int, max_draft_tokens: int) -> None:
        self._left = BLOCK_STEPS_FEW if requests < FEW_REQUESTS else BLOCK_STEPS
        self._block = Block(drafter, min(BLOCK_TOKENS, max_draft_tokens))
        self._since = int(self._rng.integers(INTERVAL_STEPS // 10))

    def postpone(self) -> None:
        """Nothing is worth exploring now; look again soon."""
        self._since = -POSTPONE_STEPS if self._since < INTERVAL_STEPS else INTERVAL_STEPS - POSTPONE_STEPS

    @property
    def running(self) -> bool:
        return self._left > 0

    def step(self, passed: int = 1) -> Block | None:
        """One closed-loop decision, `passed` steps after the last one; the block that runs, or None."""
        self._since += passed
        if self._left == 0:
            return None
        self._left -= 1
        return self._block

    def observe(self, outcome: StepOutcome, rate: float) -> None:
        """Earn from each step, and pay for those of a block the time that their tokens take otherwise.

        rate: tokens per second of this batch as the loop serves it: what a block costs where speculation pays is not
        what it loses over plain decoding.
        """
        self._credit_s = min(self._credit_s + LOSS_SHARE * outcome.step_s, MOST_CREDIT_S)
        explores = (outcome.verify_plan.purpose, outcome.draft_plan.purpose)
        if Purpose.EXPLORE in explores and outcome.prefill_tokens == 0 and rate > 0:
            self._credit_s -= max(0.0, outcome.step_s - outcome.tokens / rate)


def upper_bounds(problem: DraftProblem, upper_paths: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """(D,): what each drafter would gain in a step if it accepted as much as it may; -inf where none can use it.

    upper_paths: (D, K), optimistic products of hazards. What the tokens cost is not optimistic: where a batch is so
    large that no acceptance would pay for them, there is nothing to find out.
    """
    served, price = problem.usable.sum(axis=1), problem.price
    lengths = problem.draft_s.shape[1] - 1
    gains = served[:, None] * upper_paths[:, :lengths].cumsum(axis=1)
    tokens = (problem.offers * problem.usable[:, None]).sum(axis=2).cumsum(axis=1)  # (D, K)
    longer_s = np.minimum(price.uniform_s(tokens), price.ragged_s(tokens)) - price.plain_s()
    spent_s = longer_s + float(problem.query_costs_s.mean()) * tokens + problem.draft_s[:, 1:]
    best = (gains - problem.rate * spent_s).max(axis=1)
    return np.where(served > 0, best, -np.inf)
