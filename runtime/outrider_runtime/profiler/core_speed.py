"""How fast the cores are just now, for engines that run on them.

A rented core is often half of a real one, and whoever has the other half makes the same step take up to 1.7 times as
long, for seconds at a time; no figure of the kernel shows it. Shapes that are measured in different spells would not
fit one line. So a small fixed piece of work is timed before and after each step, in CPU time, which leaves out that
others had the core meanwhile.
"""

from __future__ import annotations

import os
import time
from statistics import fmean, median

ROUNDS = 1500
"""Of the fixed work: about 0.1 ms."""
MOST_CORES = 4
"""A step on many cores must not wait for as many readings."""
FIRST_READINGS = 25


def work_us() -> float:
    """Microseconds of CPU time that the fixed work takes on the core that this thread runs on."""
    start_ns = time.thread_time_ns()
    total = 0
    for number in range(ROUNDS):
        total += number * number
    return (time.thread_time_ns() - start_ns) / 1e3


class CoreSpeed:
    """Speed by that of when it was made."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._first_us = median(self._read_us() for _ in range(FIRST_READINGS))

    def now(self) -> float:
        """Mean over the cores: 1 as at first, 0.6 where the same work takes 1.7 times as long."""
        return self._first_us / self._read_us()

    def _read_us(self) -> float:
        try:
            return fmean(self._read_core_us(core) for core in sorted(self._cores)[:MOST_CORES])
        finally:
            os.sched_setaffinity(0, self._cores)

    def _read_core_us(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        return work_us()
