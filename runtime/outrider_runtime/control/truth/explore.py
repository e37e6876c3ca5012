"""Bounded exploration: short blocks with a drafter that the choice passes over, so that a change is noticed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.data.batch import Bools, Floats
from outrider_runtime.control.selection.offers import Pool
from outrider_runtime.control.value import worth

INTERVAL_STEPS, EAGER_INTERVAL_STEPS, POSTPONE_STEPS = 120, 4, 16
LOSS_SHARE = 0.01
"""Of the steps' time that blocks may cost over going on as before."""
FIRST_CREDIT, MOST_CREDIT = 4.0, 20.0
"""In steps: what an engine may spend before it has earned it, and save up."""
BLOCK_STEPS, BLOCK_STEPS_FEW, FEW_REQUESTS = 4, 8, 4
"""With few requests a step brings few trials."""
LEAST_TRIED, TRIED_SHARE = 4, 1 / 8
"""Requests that try another drafter beside the choice."""


@dataclass(frozen=True, slots=True)
class Block:
    drafter: int
    draft_tokens: int


class Explorer:
    """Keeps the account of what exploring cost, and says when a block may start."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._since = self._left = 0
        self._block: Block | None = None
        self._credit = FIRST_CREDIT

    def due(self, *, eager: bool) -> bool:
        """A block may start: the interval is over and its cost is earned. `eager`: some drafter is hardly known."""
        interval = EAGER_INTERVAL_STEPS if eager else INTERVAL_STEPS
        return self._left == 0 and self._since >= interval and self._credit > 0

    def start(self, drafter: int, requests: int) -> Block:
        """The first step of a block: one token, as every trial of the first position tells of all."""
        self._left = (BLOCK_STEPS_FEW if requests < FEW_REQUESTS else BLOCK_STEPS) - 1
        self._block = Block(drafter, 1)
        self._since = int(self._rng.integers(INTERVAL_STEPS // 10))  # not in step with periodic traffic
        return self._block

    def postpone(self) -> None:
        """Nothing is worth exploring now; look again soon."""
        self._since = min(self._since, INTERVAL_STEPS) - POSTPONE_STEPS

    def step(self) -> Block | None:
        """One decision of the closed loop; the block that goes on, or None."""
        self._since += 1
        if self._left == 0:
            return None
        self._left -= 1
        return self._block

    def some_of(self, requests: int) -> Bools:
        """(requests,): who tries it in this step."""
        return self._rng.permutation(requests) < max(LEAST_TRIED, TRIED_SHARE * requests)

    def earn(self) -> None:
        """A step has ended."""
        self._credit = min(self._credit + LOSS_SHARE, MOST_CREDIT)

    def pay(self, step_s: float, worth_s: float) -> None:
        """A block's step took `step_s`; its tokens take `worth_s` as the loop serves them otherwise."""
        self._credit -= max(0.0, 1.0 - worth_s / step_s)


def upper_bounds(pool: Pool, upper_paths: Floats, lengths: int) -> Floats:
    """(D,): what each drafter would gain in a step if it had proposals for all whom it can serve, accepted as well as
    they may be; -inf where none can use it.

    upper_paths: (D, K), optimistic. What the tokens cost is not optimistic: where a batch is so large that no
    acceptance would pay for them, there is nothing to find out.
    """
    served = (pool.paths[:, 0] > 0).sum(axis=1)
    bounds = np.full(len(served), -np.inf)
    price = pool.price
    for drafter in np.flatnonzero(served):
        asking_s = float(pool.asking_s[drafter][pool.paths[drafter, 0] > 0].sum()) if pool.asking_s.size else 0.0
        for length in range(1, lengths + 1):
            tokens = served[drafter] * length
            if tokens > min(pool.budget, len(price.ragged_s) - 1):
                break
            even_s = (price.uniform_s if served[drafter] == pool.paths.shape[2] else price.ragged_s)[tokens]
            target_s = float(min(even_s, price.ragged_s[tokens])) - price.plain_s
            draft_s = pool.first_s[drafter] + (length - 1) * pool.pass_s[drafter, 0] + tokens * pool.token_s[drafter]
            draft_s += length * asking_s
            gain = float(served[drafter] * upper_paths[drafter, :length].sum())
            bounds[drafter] = max(bounds[drafter], worth(gain, target_s + draft_s, price.rate))
    return bounds
