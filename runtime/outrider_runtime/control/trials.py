"""The scheduler of trials: short blocks of steps that measure what the loop's own choices cannot show.

A probe is k = 0 while speculation is the choice: it measures the real speed-up. An exploration runs a drafter that the
choice leaves out. Both are charged to one account, which earns LOSS_SHARE of the steps' time. Probes run at fixed
periods; explorations use what they leave.

Probes are compared with the steps near them. A step's efficiency is the modelled time of plain decoding for its work
(its tokens, and its prefill) / its measured time. So steps of different batches can be compared (at batch 90 no two are
equal), and an error of the model about plain decoding cancels between a probe and its neighbours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import NO_DRAFTER, Floats
from outrider_runtime.control.draft_options import DraftOptions
from outrider_runtime.control.plans import Purpose
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
"""Steps between explorations; between steps that may start one while some drafter is untried; after nothing was worth
exploring."""
EXPLORED_PROPOSALS, MOST_BLOCK_STEPS = 32, 8
"""Proposals that an exploration makes: an acceptance rate then has a standard error of 0.09 at most. Most steps that it
takes: with few requests it ends after fewer proposals, and the next exploration goes on."""
PROBE_STEPS = 4
"""Steps of a probe. The first one still verifies earlier proposals, and is not counted."""
NEIGHBOURS, LEAST_NEIGHBOURS = 32, 6
"""Most and fewest speculating steps that a probe is compared with."""
PROBE_WEIGHT_DECAY = 0.85
"""Factor on the weight of older probes at each new one."""
LEAST_DEVIATION = 0.03
"""Least standard deviation of a probe's log ratio: machines drift by this much between two blocks of steps."""
SIGMAS = 2.0
"""Half of the confidence interval / the standard error."""


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
        """Whether the interval since the last exploration is over and there is credit. eager: some drafter is untried;
        then every EAGER_INTERVAL_STEPS-th step may start one."""
        since = self._since_exploration
        is_due = since >= INTERVAL_STEPS or (eager and since > 0 and since % EAGER_INTERVAL_STEPS == 0)
        return is_due and self._exploration_left == 0 and self.credit > 0

    def explore(self, drafter: int, requests: int) -> Trial:
        """Start a block of steps with draft length 1, since the first position tells most. This is its first step.

        requests: number of requests that the drafter proposes for in a step."""
        self._exploration_left = min(math.ceil(EXPLORED_PROPOSALS / requests), MOST_BLOCK_STEPS) - 1
        self._exploration = Trial(Purpose.EXPLORE, drafter, 1)
        self._since_exploration = int(self._rng.integers(INTERVAL_STEPS // 10))  # random, against periodic traffic
        return self._exploration

    def postpone(self) -> None:
        """Look again after POSTPONE_STEPS, since nothing is worth exploring at present."""
        self._since_exploration = min(self._since_exploration, INTERVAL_STEPS) - POSTPONE_STEPS

    # -- the account --------------------------------------------------------------------------------------------

    def earn(self) -> None:
        """Earn credit for a step that has ended."""
        self.credit = min(self.credit + LOSS_SHARE, MOST_CREDIT)

    def pay(self, step_s: float, worth_s: float) -> None:
        """Pay for a step of a trial: it took `step_s`, while its tokens would take `worth_s` by the loop's own
        choices."""
        self.credit -= max(0.0, 1.0 - worth_s / step_s)


def upper_bounds(options: DraftOptions, upper_paths: Floats, lengths: int) -> Floats:
    """(D,): worth in tokens of a step with each drafter alone, if it had proposals for all requests that it can serve
    and acceptance was as high as `upper_paths`; -inf if no request can use it.

    upper_paths: (D, K), optimistic path probabilities. The cost is not optimistic: if a batch is so large that no
    acceptance would pay for the tokens, there is nothing to find out.
    """
    serves = options.paths[:, 0] > 0
    served, bounds, price = serves.sum(axis=1), np.full(len(serves), -np.inf), options.price
    for drafter in np.flatnonzero(served):
        use_s, catch_up_s = (
            float(seconds[drafter][serves[drafter]].sum()) if seconds.size else 0.0
            for seconds in (options.use_s, options.catch_up_s)
        )
        for length in range(1, lengths + 1):
            tokens = served[drafter] * length
            if tokens > min(options.budget, len(price.target_s) - 1):
                break
            target_s = float(price.target_s[tokens]) - price.plain_s
            draft_s = (
                options.first_s[drafter] + (length - 1) * options.pass_s[drafter, 0] + tokens * options.token_s[drafter]
            )
            draft_s += length * use_s + catch_up_s
            gain = float(served[drafter] * upper_paths[drafter, :length].sum())
            bounds[drafter] = max(bounds[drafter], worth(gain, target_s + draft_s, price.rate))
    return bounds


class Neighbour(NamedTuple):
    """A step near a probe."""

    work_s: float
    """Modelled seconds of plain decoding for the step's tokens and prompts."""
    seconds: float
    """Measured seconds of the step."""
    plain_s: float
    """Modelled seconds of a plain step at the step's batch and with its prompts."""
    for_slo: bool = False
    """It speculated for late requests, whatever that cost in goodput."""


@dataclass(slots=True)
class ProbeCounts:
    """Counters since the start. Readers take their differences, and add them over pods."""

    probes: int = 0
    plain_tokens: float = 0.0
    """Tokens of the probes' counted steps."""
    plain_s: float = 0.0
    """Seconds of these steps."""
    speculative_tokens: float = 0.0
    """Tokens that steps with speculation give in the same time at the same batch."""
    weight: float = 0.0
    """Sum of 1 / variance of the probes' ratios, speculation / plain decoding."""
    weighted_ratio: float = 0.0
    """Sum of the ratios, each times its weight."""


class LogGain(NamedTuple):
    """Log of speculation's efficiency / plain decoding's."""

    mean: float
    margin: float
    """Half of its confidence interval."""

    @property
    def least(self) -> float:
        return self.mean - self.margin

    @property
    def most(self) -> float:
        return self.mean + self.margin


class MeasuredSpeedup:
    """Compares probes with the steps near them."""

    def __init__(self) -> None:
        self.counts = ProbeCounts()
        self._neighbours = {for_slo: deque[Neighbour](maxlen=NEIGHBOURS) for for_slo in (False, True)}
        self._plain: list[tuple[float, float]] = []
        self._plain_tokens = 0
        self._weight = self._evidence = 0.0

    def can_judge(self, *, for_slo: bool) -> bool:
        """Whether there are enough steps to compare a probe with."""
        return len(self._neighbours[for_slo]) >= LEAST_NEIGHBOURS

    @property
    def awaits_verdict(self) -> bool:
        """Whether steps of a probe have been observed since the last verdict."""
        return bool(self._plain)

    def observe_plain(self, work_s: float, seconds: float, tokens: int) -> None:
        """Count a step of a probe that neither verified nor proposed. work_s: see `Neighbour`. seconds: without drafts,
        whose times under asynchronous scheduling may exceed their step's; such a step does not count."""
        if seconds <= 0.0:
            return
        self._plain.append((work_s, seconds))
        self._plain_tokens += tokens

    def observe_speculative(self, step: Neighbour) -> None:
        """Count a step whose proposals were verified and at whose end drafters ran again."""
        self._neighbours[step.for_slo].append(step)

    def forget(self) -> None:
        """Drop earlier verdicts on speculation, since it was switched off."""
        self._weight = self._evidence = 0.0
        self._neighbours[False].clear()

    def verdict(self, *, for_slo: bool) -> LogGain | None:
        """Compare the probe that has ended with its neighbours. None: there are too few steps to compare.

        for_slo: the probe interrupted speculation for late requests. It counts for the reported speed-up, but gives no
        verdict: that meeting a TPOT costs goodput is no reason to switch speculation off.
        """
        neighbours, plain, tokens = self._neighbours[for_slo], self._plain, self._plain_tokens
        self._plain, self._plain_tokens = [], 0
        gave_tokens = _work_s(neighbours) > 0.0 and sum(work_s for work_s, _ in plain) > 0.0
        if len(plain) < PROBE_STEPS - 2 or len(neighbours) < LEAST_NEIGHBOURS or not gave_tokens:
            return None
        speculative, speculative_error = _efficiency([(step.work_s, step.seconds) for step in neighbours])
        plain_efficiency, plain_error = _efficiency(plain)
        ratio = min(speculative / plain_efficiency, _most_speedup(neighbours))
        weight = 1.0 / (speculative_error**2 + plain_error**2 + LEAST_DEVIATION**2)
        self._count(ratio, weight, tokens, sum(seconds for _, seconds in plain))
        if for_slo:
            return LogGain(0.0, math.inf)
        self._weight = PROBE_WEIGHT_DECAY * self._weight + weight
        self._evidence = PROBE_WEIGHT_DECAY * self._evidence + weight * math.log(ratio)
        return LogGain(self._evidence / self._weight, SIGMAS / math.sqrt(self._weight))

    def _count(self, ratio: float, weight: float, tokens: int, seconds: float) -> None:
        counts = self.counts
        counts.probes += 1
        counts.plain_tokens += tokens
        counts.plain_s += seconds
        counts.speculative_tokens += ratio * tokens
        counts.weight += weight
        counts.weighted_ratio += weight * ratio


def _most_speedup(steps: Iterable[Neighbour]) -> float:
    """Modelled work of the steps / that of plain steps. A step that verifies proposals is never shorter than a plain
    one, so the speed-up cannot be larger."""
    return max(1.0, _work_s(steps) / sum(step.plain_s for step in steps))


def _work_s(steps: Iterable[Neighbour]) -> float:
    return sum(step.work_s for step in steps)


def _efficiency(steps: list[tuple[float, float]]) -> tuple[float, float]:
    """Modelled time of plain decoding / measured time, and the relative standard error of that (ratio estimator)."""
    work_s, seconds = np.array(steps).T
    ratio = work_s.sum() / seconds.sum()
    residual = work_s - ratio * seconds
    error = math.sqrt(len(steps) / max(1, len(steps) - 1) * float(residual @ residual)) / work_s.sum()
    return float(ratio), error
