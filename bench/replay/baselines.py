"""Baselines that only benchmarks replay: a table of draft lengths by batch size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider_runtime.control.batch import Batch
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.recorded_proposals import mean_acceptance_rates
from outrider_runtime.simulate.worlds.world import Pass, World

TABLE_CONTEXT = 600


class ByBatchSize(Fixed):
    """vLLM's `num_speculative_tokens_per_batch_size`. At 0 the draft does not run: a head has a gap then."""

    def __init__(self, drafters: Sequence[Drafter], drafter: int, table: Sequence[int]) -> None:
        """table: k by the number of requests, from 1 on; the last entry holds for more."""
        super().__init__(drafters, drafter)
        self._table = table

    def k(self, batch: Batch) -> int:
        return self._table[min(max(len(batch), 1), len(self._table)) - 1]


def tuned_table(world: World, recording: Recording, drafter: str, longest: int, requests: int = 256) -> list[int]:
    """Find the best k at each batch size for this recording's mean acceptance, as a user would by trying them all."""
    gains = 1 + np.cumsum(np.cumprod(mean_acceptance_rates(recording, drafter)))[:longest]
    table = []
    for n in range(1, requests + 1):
        passes = [Pass(n * (1 + k), n, TABLE_CONTEXT, n * (1 + k)) for k in range(longest + 1)]
        seconds = [world.target_s(passes[0])] + [
            world.target_s(passes[k]) + world.draft_s(drafter, passes[k], k) for k in range(1, longest + 1)
        ]
        table.append(int(np.argmax(np.array([1.0, *gains]) / seconds)))
    return table
