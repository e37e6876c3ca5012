"""Compile the hot functions of the core and the loop before the engine is ready.

    python -m outrider_runtime.loop.compile_loop

does so for every kind of drafter, while an image is built.
"""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.settings import Settings
from outrider_runtime.control.warm_up import DRAFTERS, REQUESTS, compile_all
from outrider_runtime.loop.coverage import DraftCoverage, ScheduledStep


def compile_loop(settings: Settings) -> None:
    """Compile for the types that `settings` leads to. It takes minutes if the machine code is not on disk yet."""
    compile_all(settings)
    coverage = DraftCoverage(REQUESTS, 16, lambda _name, _first, _last: [])
    rows = np.arange(REQUESTS)
    step = ScheduledStep([str(row) for row in rows], rows, rows, rows, rows, rows + 1)
    coverage.ran(step, neural=True)
    coverage.ran(step, neural=False)


if __name__ == "__main__":
    compile_loop(Settings(DRAFTERS, max_draft_tokens=5, slots=REQUESTS))
