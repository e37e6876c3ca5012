"""What speculation really bought: probes of plain decoding, and the switch that trusts them more than the model."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.batch import Purpose, StepOutcome
from outrider_runtime.control.counters import SpeedupCounters

PROBE_STEPS = 4
"""Choices of k = 0 in a row; the step that makes the first one still verifies old drafts and is not counted."""
PERIOD_STEPS = 400
"""Between probes: 1% of steps."""
FIRST_PROBE_AFTER = 60
RETRY_PROBE_AFTER = 12
"""After speculation was off: know soon whether it still loses."""
SUSPICIOUS_PERIOD_STEPS = 80
"""After a probe that looked better than speculation."""
NEIGHBOURS = 32
LEAST_NEIGHBOURS = 6
MEMORY = 0.7
"""Weight of the older probes' evidence at each new one."""
LEAST_DEVIATION = 0.03
"""Of a probe's log ratio: machines drift by this much between two blocks."""
SIGMAS = 2.0
FIRST_BACKOFF_STEPS = 200
LAST_BACKOFF_STEPS = 6400


@dataclass(frozen=True, slots=True)
class _Timed:
    requests: int
    tokens: int
    seconds: float


class Truth:
    """Says when to probe, compares, and forbids speculation where it loses."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.counters = SpeedupCounters()
        self._speculative: deque[_Timed] = deque(maxlen=NEIGHBOURS)
        self._plain: list[_Timed] = []
        self._block_left = 0
        self._wait = FIRST_PROBE_AFTER
        self._weight = 0.0
        self._evidence = 0.0
        self._backoff = FIRST_BACKOFF_STEPS
        self._off_steps = 0
        self._off_requests = 0

    @property
    def off(self) -> bool:
        """True while speculation is switched off because it measured worse than plain decoding."""
        return self._off_steps > 0

    def lift(self) -> None:
        """The traffic has changed: what was measured says nothing any more."""
        self._off_steps = 0
        self._weight = self._evidence = 0.0
        self._wait = min(self._wait, SUSPICIOUS_PERIOD_STEPS)

    def next_is_probe(self, requests: int, passed: int = 1, *, speculating: bool, prefill: bool) -> bool:
        """One closed-loop decision, `passed` steps after the last one. A probe starts only among speculative steps
        without prefill."""
        if self.off:
            self._off_steps -= min(passed, self._off_steps)
            if requests < 0.7 * self._off_requests:
                self.lift()
        if self._block_left > 0:
            self._block_left -= 1
            return True
        if not speculating:
            return False
        self._wait -= passed
        if self._wait > 0 or prefill or len(self._speculative) < LEAST_NEIGHBOURS:
            return False
        self._block_left = PROBE_STEPS - 1
        self._wait = round(PERIOD_STEPS * self._rng.uniform(0.9, 1.1))
        return True

    def observe(self, outcome: StepOutcome) -> None:
        """A step whose time was plausible."""
        purpose = outcome.verify_plan.purpose
        if purpose is Purpose.PROBE:
            if outcome.prefill_tokens == 0:
                # The draft's pass (it keeps its KV whole) is no part of plain decoding.
                seconds = outcome.step_s - sum(outcome.draft_s.values())
                self._plain.append(_Timed(outcome.n_requests, outcome.tokens, seconds))
            return
        if self._plain:
            self._judge(self._plain)
            self._plain = []
        elif _is_neighbour(outcome):
            self._speculative.append(_Timed(outcome.n_requests, outcome.tokens, outcome.step_s))

    def _judge(self, plain: list[_Timed]) -> None:
        requests = plain[0].requests
        plain = [step for step in plain if step.requests == requests and step.seconds > 0]
        neighbours = [step for step in self._speculative if step.requests == requests]
        if len(plain) < PROBE_STEPS - 2 or len(neighbours) < LEAST_NEIGHBOURS:
            self._wait = SUSPICIOUS_PERIOD_STEPS
            return
        self._count(plain, neighbours)
        ratio, deviation = _log_ratio(plain, neighbours)
        weight = 1.0 / (deviation**2 + LEAST_DEVIATION**2)
        self._weight = MEMORY * self._weight + weight
        self._evidence = MEMORY * self._evidence + weight * ratio
        self._switch(requests)

    def _switch(self, requests: int) -> None:
        mean, margin = self._evidence / self._weight, SIGMAS / math.sqrt(self._weight)
        if mean + margin < 0:
            self._off_steps, self._off_requests = self._backoff, requests
            self._backoff = min(2 * self._backoff, LAST_BACKOFF_STEPS)
            self._weight = self._evidence = 0.0
            self._wait = RETRY_PROBE_AFTER
            self._speculative.clear()
        elif mean < 0:
            self._wait = SUSPICIOUS_PERIOD_STEPS
        elif mean - margin > 0:
            self._backoff = FIRST_BACKOFF_STEPS

    def _count(self, plain: list[_Timed], neighbours: list[_Timed]) -> None:
        """Both sides weigh the same number of steps, so that sums over probes of many batch sizes compare."""
        share = len(plain) / len(neighbours)
        old = self.counters
        self.counters = SpeedupCounters(
            probes=old.probes + 1,
            baseline_tokens=old.baseline_tokens + sum(step.tokens for step in plain),
            baseline_s=old.baseline_s + sum(step.seconds for step in plain),
            speculative_tokens=old.speculative_tokens + share * sum(step.tokens for step in neighbours),
            speculative_s=old.speculative_s + share * sum(step.seconds for step in neighbours),
        )


def _is_neighbour(outcome: StepOutcome) -> bool:
    """A step of the closed loop as users get it: it verified, and proposed for the next one."""
    return (
        outcome.prefill_tokens == 0
        and outcome.verify_plan.purpose is Purpose.CHOICE
        and outcome.draft_plan.purpose is Purpose.CHOICE
        and bool(outcome.requests)
    )


def _log_ratio(plain: list[_Timed], neighbours: list[_Timed]) -> tuple[float, float]:
    """log(speculative / plain goodput), and its standard deviation."""
    speculative_rate, speculative_error = _rate(neighbours)
    plain_rate, plain_error = _rate(plain)
    return math.log(speculative_rate / plain_rate), math.hypot(speculative_error, plain_error)


def _rate(steps: list[_Timed]) -> tuple[float, float]:
    """Tokens per second of `steps`, and its relative standard error (ratio estimator)."""
    tokens, seconds = np.array([(step.tokens, step.seconds) for step in steps], dtype=float).T
    rate = tokens.sum() / seconds.sum()
    residual = tokens - rate * seconds
    error = math.sqrt(len(steps) / max(1, len(steps) - 1) * float(residual @ residual)) / tokens.sum()
    return float(rate), error
