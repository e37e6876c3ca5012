"""What speculation really buys: blocks of steps with k = 0, compared with their neighbours through the latency model.

A step's efficiency is the time that the model says plain decoding takes for what the step gave (its tokens, and the
prompts that it read) / the time that it took. So steps of any two batches compare (at batch 90 no two are equal), and
what the model gets wrong about plain decoding cancels between a probe and its neighbours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PROBE_STEPS = 4
"""Steps of a probe. The first one still verifies what was proposed before, and is not counted."""
NEIGHBOURS, LEAST_NEIGHBOURS = 32, 6
MEMORY = 0.85
"""Weight of the older probes' evidence at each new one."""
LEAST_DEVIATION = 0.03
"""Standard deviation of a probe's log ratio at least: machines drift by this much between two blocks."""
SIGMAS = 2.0


class Neighbour(NamedTuple):
    """A step near a probe."""

    work_s: float
    """Seconds that plain decoding takes, by the model, for what the step gave: its tokens, and its prompts."""
    seconds: float
    """Seconds that it took."""
    plain_s: float
    """Seconds of a plain step, by the model, at the step's batch and with its prompts."""
    for_slo: bool = False
    """It speculated for requests that were behind their TPOT, whatever that cost goodput."""


@dataclass(slots=True)
class ProbeCounts:
    """Counters since the start, which readers take differences of and add over pods."""

    probes: int = 0
    plain_tokens: float = 0.0
    """Tokens of the probes' steps that count."""
    plain_s: float = 0.0
    speculative_tokens: float = 0.0
    """Tokens that steps with speculation give in the same time at the same batch."""
    weight: float = 0.0
    """Sum of 1 / variance of the probes' ratios, speculation / plain decoding."""
    weighted_ratio: float = 0.0
    """Sum of the ratios, each times its weight."""


class LogGain(NamedTuple):
    """Log of the ratio of speculation to plain decoding."""

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
        """Whether enough steps are known to compare a probe with."""
        return len(self._neighbours[for_slo]) >= LEAST_NEIGHBOURS

    @property
    def awaits_verdict(self) -> bool:
        """Steps of a probe have been observed."""
        return bool(self._plain)

    def observe_plain(self, work_s: float, seconds: float, tokens: int) -> None:
        """A step of a probe that neither verified nor proposed. work_s: see `Neighbour`."""
        self._plain.append((work_s, seconds))
        self._plain_tokens += tokens

    def observe_speculative(self, step: Neighbour) -> None:
        """A step that drafters ran for, and for the next one."""
        self._neighbours[step.for_slo].append(step)

    def forget(self) -> None:
        """Judge speculation afresh: it was switched off."""
        self._weight = self._evidence = 0.0
        self._neighbours[False].clear()

    def verdict(self, *, for_slo: bool) -> LogGain | None:
        """Compare the probe that has ended. None: there is too little to compare.

        for_slo: it interrupted speculation for late requests, and says nothing of the rest: what a TPOT costs is no
        reason to switch speculation off.
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
    """Tokens of a step / tokens of a plain one, by the work in it: no step that verifies proposals is shorter than a
    plain one, so speculation is never worth more."""
    return max(1.0, _work_s(steps) / sum(step.plain_s for step in steps))


def _work_s(steps: Iterable[Neighbour]) -> float:
    return sum(step.work_s for step in steps)


def _efficiency(steps: list[tuple[float, float]]) -> tuple[float, float]:
    """Plain decoding's time / the time taken, and its relative standard error (ratio estimator)."""
    work_s, seconds = np.array(steps).T
    ratio = work_s.sum() / seconds.sum()
    residual = work_s - ratio * seconds
    error = math.sqrt(len(steps) / max(1, len(steps) - 1) * float(residual @ residual)) / work_s.sum()
    return float(ratio), error
