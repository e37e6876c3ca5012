"""The real speed-up of speculation: probes (blocks of steps with k = 0) compared with the steps near them.

A step's efficiency is the modelled time of plain decoding for its work (its tokens, and its prefill) / its measured
time. So steps of different batches can be compared (at batch 90 no two are equal), and an error of the model about
plain decoding cancels between a probe and its neighbours."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PROBE_STEPS = 4
"""Steps of a probe. The first one still verifies earlier proposals, and is not counted."""
NEIGHBOURS, LEAST_NEIGHBOURS = 32, 6
"""Most and fewest speculating steps that a probe is compared with."""
MEMORY = 0.85
"""Factor on the weight of older probes at each new one."""
LEAST_DEVIATION = 0.03
"""Least standard deviation of a probe's log ratio: machines drift by this much between two blocks of steps."""
SIGMAS = 2.0
"""Half of the confidence interval / the standard error."""


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
        """Count a step of a probe that neither verified nor proposed. work_s: see `Neighbour`."""
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
        self._weight = MEMORY * self._weight + weight
        self._evidence = MEMORY * self._evidence + weight * math.log(ratio)
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
