"""Measures the current speed of the cores, for engines that run on CPUs.

A rented core is often half of a physical one. A neighbour on the other half makes the same step take up to 1.7 times
as long, for seconds at a time, and no figure of the kernel shows it. Shapes measured at different speeds would not fit
one line. So a small fixed piece of work is timed before and after each step. It is timed in CPU time, which does not
count the time during which other processes have the core.
"""

from __future__ import annotations

import os
import time
from statistics import fmean, median

ROUNDS = 1500
"""Additions of the fixed work: they take about 0.1 ms, short next to a step."""
MAX_CORES = 4
"""Cores that are timed: with more, the readings would take longer than some steps."""
FIRST_READINGS = 25  # their median counts, since other processes disturb single ones


def work_us() -> float:
    """Run the fixed work on this thread's core, and return its CPU time in microseconds."""
    start_ns = time.thread_time_ns()
    total = 0
    for number in range(ROUNDS):
        total += number * number
    return (time.thread_time_ns() - start_ns) / 1e3


class CoreSpeed:
    """Speed of the cores relative to their speed when this object was made."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._first_us = median(self._read_us() for _ in range(FIRST_READINGS))

    def current(self) -> float:
        """Return current speed / first speed, a mean over the cores: 0.6 if the same work takes 1.7 times as long."""
        return self._first_us / self._read_us()

    def _read_us(self) -> float:
        try:
            return fmean(self._read_core_us(core) for core in sorted(self._cores)[:MAX_CORES])
        finally:
            os.sched_setaffinity(0, self._cores)

    def _read_core_us(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        return work_us()
