"""The scheduler of trials: short blocks of steps that measure what the loop's own choices cannot show.

A probe is k = 0 while speculation is the choice: it measures the speed-up. An exploration runs a drafter that the
choice leaves out. Both are charged to one account, which earns LOSS_SHARE of the steps' time. Probes run at fixed
periods; explorations use what they leave."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.data.batch import NO_DRAFTER, Bools, Floats
from outrider_runtime.control.data.plans import Purpose
from outrider_runtime.control.selection.offers import Pool
from outrider_runtime.control.speedup import PROBE_STEPS, MeasuredSpeedup, Neighbour
from outrider_runtime.control.value import worth

LOSS_SHARE = 0.01
"""Share of the steps' time that trials may cost, compared with the loop's own choices."""
FIRST_CREDIT, MOST_CREDIT = 4.0, 20.0
"""Credit of a new engine, and the most that it can save up, in steps."""
PERIOD_STEPS, FIRST_PROBE_AFTER, RETRY_PROBE_AFTER, SUSPICIOUS_PERIOD_STEPS = 400, 60, 12, 80
"""Steps between probes (1% of steps are probes); before the first; after speculation was off; after a probe that looked
better than speculation."""
CLEAR = math.log(1.5)
"""Log of a speed-up that is beyond doubt: the next probe then waits for two periods."""
FIRST_BACKOFF_STEPS, LAST_BACKOFF_STEPS = 200, 6400
"""Steps that speculation stays off after it lost, doubled each time up to the second number."""
OTHER_LOAD = 0.7
"""Speculation is on again at once if requests / requests of the probe that lost is below this: at a lower load it may
pay."""
INTERVAL_STEPS, EAGER_INTERVAL_STEPS, POSTPONE_STEPS = 120, 4, 16
"""Steps between explorations; the same while some drafter is untried; and after nothing was worth exploring."""
BLOCK_STEPS, BLOCK_STEPS_FEW, FEW_REQUESTS = 4, 8, 4
"""Steps of an exploration; the same with fewer than FEW_REQUESTS requests, since a step then brings few
observations."""
LEAST_TRIED, TRIED_SHARE = 4, 1 / 8
"""Fewest requests, and share of the requests, that try another drafter together with the choice."""


class Trial(NamedTuple):
    """What a block of steps tries out."""

    purpose: Purpose
    """PROBE or EXPLORE."""
    drafter: int = NO_DRAFTER
    draft_tokens: int = 0


PROBE = Trial(Purpose.PROBE)


class TrialSchedule:
    """Decides which steps are trials, and switches speculation off for some time after probes found that it loses."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.speedup = MeasuredSpeedup()
        self.credit = FIRST_CREDIT
        """Steps that trials may still cost."""
        self._exploration: Trial | None = None
        self._probe_left = self._exploration_left = self._since_exploration = 0
        self._until_probe = FIRST_PROBE_AFTER
        self._for_slo = False
        """The probe interrupts speculation for late requests."""
        self._backoff = FIRST_BACKOFF_STEPS
        self._off_steps = self._off_requests = self._requests = 0

    @property
    def off(self) -> bool:
        """Whether speculation is switched off for some time, since it measured worse than plain decoding."""
        return self._off_steps > 0

    def step(self, requests: int, *, speculating: bool, for_slo: bool = False) -> Trial | None:
        """The trial of the next decision; None: none is under way, and an exploration may start.

        speculating: the choice is not k = 0. for_slo: it speculates for late requests.
        """
        self._since_exploration += 1
        exploration = self._exploration if self._exploration_left else None
        self._exploration_left -= exploration is not None
        if self.probes(requests, speculating=speculating, for_slo=for_slo):
            return PROBE
        return exploration

    # -- probes -------------------------------------------------------------------------------------------------

    def probes(self, requests: int, *, speculating: bool, for_slo: bool) -> bool:
        """Whether the next decision is a probe. One starts only where speculation is the choice."""
        self._requests = requests
        if self.off:
            self._off_steps -= 1
            if requests < OTHER_LOAD * self._off_requests:
                self._off_steps = 0
        if self._probe_left > 0:
            self._probe_left -= 1
            return True
        if not speculating:
            return False
        self._until_probe -= 1
        if self._until_probe > 0 or not self.speedup.can_judge(for_slo=for_slo):
            return False
        self._probe_left, self._for_slo = PROBE_STEPS - 1, for_slo
        self._until_probe = round(PERIOD_STEPS * self._rng.uniform(0.9, 1.1))
        return True

    def observe(self, step: Neighbour, *, speculates: bool) -> None:
        """Count a step that is not a probe. speculates: its proposals were verified, and drafters ran again at its
        end."""
        if self.speedup.awaits_verdict and self._probe_left == 0:
            self._judge()
        elif speculates and step.seconds > 0:
            self.speedup.observe_speculative(step)

    def _judge(self) -> None:
        gain = self.speedup.verdict(for_slo=self._for_slo)
        if gain is None:
            self._until_probe = SUSPICIOUS_PERIOD_STEPS
        elif gain.most < 0:
            self._off_steps, self._off_requests = self._backoff, self._requests
            self._backoff = min(2 * self._backoff, LAST_BACKOFF_STEPS)
            self._until_probe = RETRY_PROBE_AFTER
            self.speedup.forget()
        elif gain.mean < 0:
            self._until_probe = SUSPICIOUS_PERIOD_STEPS
        elif gain.least > 0:
            self._backoff = FIRST_BACKOFF_STEPS
            self._until_probe += PERIOD_STEPS if gain.least > CLEAR else 0

    # -- exploration --------------------------------------------------------------------------------------------

    def may_explore(self, *, eager: bool) -> bool:
        """Whether the interval since the last exploration is over and there is credit. eager: some drafter is
        untried."""
        interval = EAGER_INTERVAL_STEPS if eager else INTERVAL_STEPS
        return self._exploration_left == 0 and self._since_exploration >= interval and self.credit > 0

    def explore(self, drafter: int, requests: int) -> Trial:
        """Start a block of steps with draft length 1, since the first position tells most. This is its first step."""
        self._exploration_left = (BLOCK_STEPS_FEW if requests < FEW_REQUESTS else BLOCK_STEPS) - 1
        self._exploration = Trial(Purpose.EXPLORE, drafter, 1)
        self._since_exploration = int(self._rng.integers(INTERVAL_STEPS // 10))  # random, against periodic traffic
        return self._exploration

    def postpone(self) -> None:
        """Look again after POSTPONE_STEPS, since nothing is worth exploring at present."""
        self._since_exploration = min(self._since_exploration, INTERVAL_STEPS) - POSTPONE_STEPS

    def some_of(self, requests: int) -> Bools:
        """(requests,): a random choice of requests that try the drafter in this step."""
        return self._rng.permutation(requests) < max(LEAST_TRIED, TRIED_SHARE * requests)

    # -- the account --------------------------------------------------------------------------------------------

    def earn(self) -> None:
        """Earn credit for a step that has ended."""
        self.credit = min(self.credit + LOSS_SHARE, MOST_CREDIT)

    def pay(self, step_s: float, worth_s: float) -> None:
        """Pay for a step of a trial: it took `step_s`, while its tokens would take `worth_s` by the loop's own
        choices."""
        self.credit -= max(0.0, 1.0 - worth_s / step_s)


def upper_bounds(pool: Pool, upper_paths: Floats, lengths: int) -> Floats:
    """(D,): worth in tokens of a step with each drafter alone, if it had proposals for all requests that it can serve
    and acceptance was as high as `upper_paths`; -inf if no request can use it.

    upper_paths: (D, K), optimistic path probabilities. The cost is not optimistic: if a batch is so large that no
    acceptance would pay for the tokens, there is nothing to find out.
    """
    served = (pool.paths[:, 0] > 0).sum(axis=1)
    bounds = np.full(len(served), -np.inf)
    price = pool.price
    for drafter in np.flatnonzero(served):
        asking_s = float(pool.asking_s[drafter][pool.paths[drafter, 0] > 0].sum()) if pool.asking_s.size else 0.0
        for length in range(1, lengths + 1):
            tokens = served[drafter] * length
            if tokens > min(pool.budget, len(price.varlen_s) - 1):
                break
            even_s = (price.uniform_s if served[drafter] == pool.paths.shape[2] else price.varlen_s)[tokens]
            target_s = float(min(even_s, price.varlen_s[tokens])) - price.plain_s
            draft_s = pool.first_s[drafter] + (length - 1) * pool.pass_s[drafter, 0] + tokens * pool.token_s[drafter]
            draft_s += length * asking_s
            gain = float(served[drafter] * upper_paths[drafter, :length].sum())
            bounds[drafter] = max(bounds[drafter], worth(gain, target_s + draft_s, price.rate))
    return bounds
