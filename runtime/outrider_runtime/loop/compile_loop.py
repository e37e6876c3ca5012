"""Compile the hot functions of the core and the loop before the engine is ready.

    python -m outrider_runtime.loop.compile_loop

does so for every kind of drafter, while an image is built.
"""

from __future__ import annotations

import numpy as np

from outrider_runtime.control.batch import Ints
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.warm_up import DRAFTERS, REQUESTS, compile_all
from outrider_runtime.drafters.kept_answers import KeptAnswer, KeptAnswers
from outrider_runtime.drafters.longest_match import follow_matches
from outrider_runtime.drafters.suffix import MatchLengths
from outrider_runtime.loop.coverage import DraftCoverage, ScheduledStep
from outrider_runtime.loop.step_columns import columns_ahead, columns_scheduled


def compile_loop(settings: Settings) -> None:
    """Compile for the types that `settings` leads to. It takes minutes if the machine code is not on disk yet."""
    compile_all(settings)
    coverage = DraftCoverage(REQUESTS, 16, lambda _name, _first, _last: [])
    rows = np.arange(REQUESTS)
    step = ScheduledStep([str(row) for row in rows], rows, rows, rows, rows, rows + 1)
    coverage.ran(step, neural=True)
    coverage.ran(step, neural=False)
    table = rows, rows, rows, np.zeros(REQUESTS)
    columns_ahead(rows, rows, rows, table, 0.0, 1)
    columns_scheduled(rows, (rows, rows, rows), rows, rows, table, 0.0)
    _compile_searches(rows)


def _compile_searches(rows: Ints) -> None:
    texts, lengths = np.zeros((REQUESTS, 4), np.int32), np.full(REQUESTS, 4)
    proposals = follow_matches(texts, rows, lengths, MatchLengths(1, 4), 1)
    kept = KeptAnswers(0, 4, 0.0)
    kept.update([KeptAnswer(0, texts[0], 0.0)], now_s=0.0)
    kept.improve(proposals, texts, rows, lengths, np.zeros(REQUESTS, np.int64))


if __name__ == "__main__":
    compile_loop(Settings(DRAFTERS, max_draft_tokens=5, slots=REQUESTS))
