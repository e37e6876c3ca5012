"""How fast the machine's cores are, while something is measured on them.

The cores of a rented machine are often halves of a real core, and whoever has the other half makes the same work take
up to 1.7 times as long, for seconds at a time; no figure that the kernel keeps shows it. So a small fixed piece of work
is timed fifty times a second on every core, in CPU time, which leaves out that others had the core meanwhile. It takes
half a percent of the cores, from every system alike.

python -m tests.benchmarks.evidence.speedometer FILE    appends the microseconds of each reading
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from outrider_runtime.profiler.core_speed import work_us

PERIOD_S = 0.02
FEWEST = 10
"""Readings that say something."""


class Speedometer:
    """Reads the machine's speed in a process of its own. Use as a context manager."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> Speedometer:
        self._file.write_text("")
        self._process = subprocess.Popen([sys.executable, "-m", __name__, str(self._file)])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def mark(self) -> int:
        """Now, for `work_us_since`."""
        return self._file.stat().st_size

    def clock(self, usual_us: float) -> MachineClock:
        """usual_us: what the fixed work takes at the machine's usual speed."""
        return MachineClock(self._file, usual_us)

    def work_us_since(self, mark: int) -> float | None:
        """Mean time of the fixed work since then; None with too few readings."""
        times_us, _ = _readings_since(self._file, mark)
        return fmean(times_us) if len(times_us) >= FEWEST else None


class MachineClock:
    """Seconds of a machine that is always at its usual speed: while this one is half as fast, it goes half as fast."""

    def __init__(self, file: Path, usual_us: float, wall: Callable[[], float] = time.perf_counter) -> None:
        self._file, self._usual_us, self._wall = file, usual_us, wall
        self._mark = file.stat().st_size
        self._last_us: deque[float] = deque(maxlen=FEWEST)
        self._seconds, self._read_at = 0.0, wall()

    def now(self) -> float:
        """To be asked often: the time since the last call is taken to have had the speed of the last readings."""
        times_us, self._mark = _readings_since(self._file, self._mark)
        self._last_us.extend(times_us)
        wall = self._wall()
        speed = self._usual_us / fmean(self._last_us) if self._last_us else 1.0
        self._seconds += speed * (wall - self._read_at)
        self._read_at = wall
        return self._seconds


def _readings_since(file: Path, mark: int) -> tuple[list[float], int]:
    """Microseconds of each, and the mark behind them; a line that is half written is left for the next time."""
    with file.open() as readings:
        readings.seek(mark)
        lines = [line for line in readings if line.endswith("\n")]
    return [float(line) for line in lines], mark + sum(map(len, lines))


def _read_one_core(core: int, file: Path) -> None:
    os.sched_setaffinity(threading.get_native_id(), {core})
    with file.open("a", buffering=1) as output:
        while True:
            output.write(f"{work_us():.2f}\n")
            time.sleep(PERIOD_S)


def main(file: Path) -> None:
    for core in sorted(os.sched_getaffinity(0)):
        threading.Thread(target=_read_one_core, args=(core, file)).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
