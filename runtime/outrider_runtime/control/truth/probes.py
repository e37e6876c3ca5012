"""What speculation really buys: blocks of k = 0 steps, compared with their neighbours through the latency model.

A step's efficiency is the time that plain decoding takes for what the step gave (its tokens, and the prompts that it
read), as the model says, by the time that it took. So steps of any two batches compare (at batch 90 no two are equal),
and what the model gets wrong about plain decoding cancels between a probe and its neighbours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PROBE_STEPS = 4
"""Choices of k = 0 in a row. The first step still verifies what was proposed before, and is not counted."""
PERIOD_STEPS, FIRST_PROBE_AFTER, RETRY_PROBE_AFTER, SUSPICIOUS_PERIOD_STEPS = 400, 60, 12, 80
"""Between probes (1% of steps); before the first; after speculation was off; after one that looked better."""
CLEAR = math.log(1.5)
"""Log of a gain that nothing is to be doubted of: then half as many probes do."""
NEIGHBOURS, LEAST_NEIGHBOURS = 32, 6
MEMORY = 0.85
"""Weight of the older probes' evidence at each new one."""
LEAST_DEVIATION = 0.03
"""Of a probe's log ratio: machines drift by this much between two blocks."""
SIGMAS = 2.0
FIRST_BACKOFF_STEPS, LAST_BACKOFF_STEPS = 200, 6400
OTHER_LOAD = 0.7
"""A batch of less than this share of that which was judged is another matter."""


class Neighbour(NamedTuple):
    """A step near a probe."""

    work_s: float
    """Seconds that plain decoding takes, by the model, for what the step gave: its tokens, and its prompts."""
    seconds: float
    """That it took."""
    plain_s: float
    """Seconds of a plain step, by the model, at the step's batch and with its prompts."""
    for_slo: bool = False
    """It speculated for requests that were behind their TPOT, whatever that cost goodput."""


@dataclass(slots=True)
class ProbeCounts:
    """Counters since the start, which readers take differences of and add over pods."""

    probes: int = 0
    plain_tokens: float = 0.0
    """Of the probes' steps that count."""
    plain_s: float = 0.0
    speculative_tokens: float = 0.0
    """What steps with speculation give in the same time at the same batch."""
    weight: float = 0.0
    """Sum of 1 / variance of the probes' ratios, with speculation by without."""
    weighted_ratio: float = 0.0
    """Sum of the ratios, each times its weight."""


class Probes:
    """Says when to probe, compares, and forbids speculation where it loses."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.counts = ProbeCounts()
        self._neighbours = {for_slo: deque[Neighbour](maxlen=NEIGHBOURS) for for_slo in (False, True)}
        self._for_slo = False
        """The probe interrupts speculation for requests that are behind."""
        self._plain: list[tuple[float, float]] = []
        self._plain_tokens = 0
        self._block_left = 0
        self._wait = FIRST_PROBE_AFTER
        self._weight = self._evidence = 0.0
        self._backoff = FIRST_BACKOFF_STEPS
        self._off_steps = self._off_requests = self._requests = 0

    @property
    def off(self) -> bool:
        """Speculation measured worse than plain decoding, and is switched off for some time."""
        return self._off_steps > 0

    def step(self, requests: int, *, speculating: bool, for_slo: bool = False) -> bool:
        """One decision of the closed loop; whether it is a probe. One starts only where speculation is the choice.
        for_slo: of requests that are behind. Probes are compared with such steps, too, and decide nothing then: what a
        TPOT costs is no reason to switch speculation off."""
        self._requests = requests
        if self.off:
            self._off_steps -= 1
            if requests < OTHER_LOAD * self._off_requests:
                self._off_steps = 0
        if self._block_left > 0:
            self._block_left -= 1
            return True
        if not speculating:
            return False
        self._wait -= 1
        if self._wait > 0 or len(self._neighbours[for_slo]) < LEAST_NEIGHBOURS:
            return False
        self._block_left, self._for_slo = PROBE_STEPS - 1, for_slo
        self._wait = round(PERIOD_STEPS * self._rng.uniform(0.9, 1.1))
        return True

    def observe_probe(self, work_s: float, seconds: float, tokens: int) -> None:
        """A step of a block that neither verified nor proposed. work_s: what the model says plain decoding takes for
        what it gave."""
        self._plain.append((work_s, seconds))
        self._plain_tokens += tokens

    def observe(self, step: Neighbour, *, speculates: bool) -> None:
        """Any other step of the closed loop; `speculates`: drafters ran for it, and for the next one."""
        if self._plain and self._block_left == 0:
            self._judge()
            self._plain, self._plain_tokens = [], 0
        elif speculates and step.seconds > 0:
            self._neighbours[step.for_slo].append(step)

    def _judge(self) -> None:
        neighbours = self._neighbours[self._for_slo]
        gave_tokens = _work_s(neighbours) > 0.0 and sum(work_s for work_s, _ in self._plain) > 0.0
        if len(self._plain) < PROBE_STEPS - 2 or len(neighbours) < LEAST_NEIGHBOURS or not gave_tokens:
            self._wait = SUSPICIOUS_PERIOD_STEPS
            return
        speculative, speculative_error = _efficiency([(step.work_s, step.seconds) for step in neighbours])
        plain, plain_error = _efficiency(self._plain)
        ratio = min(speculative / plain, _most_speedup(neighbours))
        weight = 1.0 / (speculative_error**2 + plain_error**2 + LEAST_DEVIATION**2)
        self._count(ratio, weight)
        if self._for_slo:
            return
        self._weight = MEMORY * self._weight + weight
        self._evidence = MEMORY * self._evidence + weight * math.log(ratio)
        self._switch()

    def _count(self, ratio: float, weight: float) -> None:
        counts = self.counts
        counts.probes += 1
        counts.plain_tokens += self._plain_tokens
        counts.plain_s += sum(seconds for _, seconds in self._plain)
        counts.speculative_tokens += ratio * self._plain_tokens
        counts.weight += weight
        counts.weighted_ratio += weight * ratio

    def _switch(self) -> None:
        mean, margin = self._evidence / self._weight, SIGMAS / math.sqrt(self._weight)
        if mean + margin < 0:
            self._off_steps, self._off_requests = self._backoff, self._requests
            self._backoff = min(2 * self._backoff, LAST_BACKOFF_STEPS)
            self._weight = self._evidence = 0.0  # once it is back, it is judged anew
            self._wait = RETRY_PROBE_AFTER
            self._neighbours[False].clear()
        elif mean < 0:
            self._wait = SUSPICIOUS_PERIOD_STEPS
        elif mean - margin > 0:
            self._backoff = FIRST_BACKOFF_STEPS
            self._wait += PERIOD_STEPS if mean - margin > CLEAR else 0


def _most_speedup(steps: Iterable[Neighbour]) -> float:
    """Tokens that a request gets in a step, by the work in it: no step that verifies proposals is shorter than a plain
    one, so speculation is never worth more."""
    return max(1.0, _work_s(steps) / sum(step.plain_s for step in steps))


def _work_s(steps: Iterable[Neighbour]) -> float:
    return sum(step.work_s for step in steps)


def _efficiency(steps: list[tuple[float, float]]) -> tuple[float, float]:
    """Plain decoding's time by the time that it took, and its relative standard error (ratio estimator)."""
    work_s, seconds = np.array(steps).T
    ratio = work_s.sum() / seconds.sum()
    residual = work_s - ratio * seconds
    error = math.sqrt(len(steps) / max(1, len(steps) - 1) * float(residual @ residual)) / work_s.sum()
    return float(ratio), error
