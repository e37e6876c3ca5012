"""`outrider-operator`, with the CPU time of every callback of its event loop measured from inside.

    python -m bench.scale.callbacks REPORT

A callback that computes for long delays the Lease, the probes and every other service. Thread CPU time is measured,
since wall time includes other processes of the machine. REPORT is written after each callback that took longer than
all before, or over 0.1 s.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path


class Longest:
    """The callback that took longest, and the number of those over 0.1 s."""

    LONG_S = 0.1

    def __init__(self, report: Path) -> None:
        self._report = report
        self._most_s = 0.0
        self._long = 0
        self._what = ""

    def note(self, handle: asyncio.Handle, cpu_s: float) -> None:
        self._long += cpu_s >= self.LONG_S
        if cpu_s > self._most_s:
            self._most_s, self._what = cpu_s, _task(handle)
        if cpu_s >= min(self._most_s, self.LONG_S):
            document = {"longest_s": self._most_s, "what": self._what, "long": self._long}
            self._report.write_text(json.dumps(document))


def _task(handle: asyncio.Handle) -> str:
    """Return the name of the task that the callback continues, else of the callback."""
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return task.get_name() if isinstance(task, asyncio.Task) else repr(handle)[:200]


def measure(longest: Longest) -> None:
    """Measure every callback. asyncio's own log of slow callbacks has wall time, which includes other processes."""
    run = asyncio.Handle._run

    def run_and_measure(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        longest.note(handle, time.thread_time() - began)

    asyncio.Handle._run = run_and_measure  # type: ignore[assignment, method-assign]


def main() -> None:
    from outrider_operator.main import main as operate

    report = Path(sys.argv.pop(1))
    measure(Longest(report))
    operate()


if __name__ == "__main__":
    main()
