"""Baselines that only benchmarks replay: a table of draft lengths by batch size, vLLM's adaptive verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from outrider_runtime.control.data.batch import Batch
from outrider_runtime.control.data.forest import Forest
from outrider_runtime.control.data.plans import Purpose, VerifyPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.proposals import mean_hazards
from outrider_runtime.simulate.replay.workload import Floats, Ints
from outrider_runtime.simulate.worlds.world import Pass, World

TABLE_CONTEXT = 600


class ByBatchSize(Fixed):
    """vLLM's `num_speculative_tokens_per_batch_size`. At 0 the draft does not run: a head has a hole then."""

    def __init__(self, drafters: Sequence[Drafter], drafter: int, table: Sequence[int]) -> None:
        """table: k by the number of requests, from 1 on; its last entry for more."""
        super().__init__(drafters, drafter)
        self._table = table

    def k(self, batch: Batch) -> int:
        return self._table[min(max(len(batch), 1), len(self._table)) - 1]


def tuned_table(world: World, recording: Recording, drafter: str, longest: int, requests: int = 256) -> list[int]:
    """The best k at each batch size for this recording's mean acceptance: what a user would find by trying them all."""
    gains = 1 + np.cumsum(np.cumprod(mean_hazards(recording, drafter)))[:longest]
    table = []
    for n in range(1, requests + 1):
        one = [Pass(n * (1 + k), n, TABLE_CONTEXT, n * (1 + k)) for k in range(longest + 1)]
        seconds = [world.target_s(one[0])] + [
            world.target_s(one[k]) + world.draft_s(drafter, one[k], k) for k in range(1, longest + 1)
        ]
        table.append(int(np.argmax(np.array([1.0, *gains]) / seconds)))
    return table


@dataclass(frozen=True, slots=True, eq=False)
class CostTables:
    """Milliseconds, as vLLM's `build_cost_tables_from_curves` makes them."""

    draft: Floats
    """By requests."""
    verify: Floats
    """By tokens."""


class Adaptive(Fixed):
    """vLLM's adaptive verification (vllm/v1/worker/gpu/spec_decode/adaptive_verification.py, 0.32).

    K tokens are drafted for every request at every step. How many are verified in all is the argmax of estimated tokens
    by cost; survival is the product of the drafter's own confidences, of the step before where the budget is chosen,
    of this one where it is given out.
    """

    def __init__(self, drafters: Sequence[Drafter], drafter: int, k: int, costs: CostTables, slots: int) -> None:
        super().__init__(drafters, drafter, k)
        self._costs = costs
        self._stale = np.ones((slots, k))

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        scheduled = np.bincount(forest.request, minlength=len(batch))
        survival = self._survival(batch, forest)
        budget = self._budget(batch, scheduled)
        order = np.argsort(-survival, kind="stable")
        nodes = np.zeros(len(forest), bool)
        nodes[order[:budget]] = True
        self._remember(batch, forest)
        return VerifyPlan(nodes, np.bincount(forest.request[nodes], minlength=len(batch)), Purpose.FIXED)

    def _survival(self, batch: Batch, forest: Forest) -> Floats:
        table = np.ones((len(batch), self._k))
        table[forest.request, forest.depth - 1] = _probability(np.asarray(forest.confidence, np.float64))
        return np.asarray(table.cumprod(1)[forest.request, forest.depth - 1])

    def _budget(self, batch: Batch, scheduled: Ints) -> int:
        valid = np.arange(self._k) < scheduled[:, None]
        scores = np.sort(self._stale[batch.slot].cumprod(1)[valid])[::-1]
        most = max(0, batch.token_budget - len(scores))
        others = min(int(np.where(batch.decodes, 1, batch.prompt).sum()), most)  # prompts share the step's budget
        sampling = int((batch.prompt_left == 0).sum())
        tokens = np.concatenate(([sampling], sampling + np.cumsum(scores)))
        verify = self._costs.verify[others : others + len(scores) + 1]
        draft = self._costs.draft[min(len(batch), len(self._costs.draft) - 1)]
        return int(np.argmax(tokens[: len(verify)] / (draft + verify)))

    def _remember(self, batch: Batch, forest: Forest) -> None:
        self._stale[batch.slot] = 1.0
        self._stale[batch.slot[forest.request], forest.depth - 1] = _probability(
            np.asarray(forest.confidence, np.float64)
        )

    def release(self, slots: Ints) -> None:
        self._stale[slots] = 1.0


def _probability(log_odds: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.nan_to_num(log_odds))))


CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
BEYOND = (768, 1024, 2048, 4096, 8192)
PROFILE_CONTEXT = 8192
"""vLLM's default, VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN."""


def cost_tables(world: World, drafter: str, k: int, requests: int = 256) -> CostTables:
    """From the world's own times, at the sizes that vLLM profiles: steps up to the largest graph, straight beyond."""
    sizes = np.array([*CAPTURED, *BEYOND])
    verify = np.maximum.accumulate([_verify_ms(world, int(size), k) for size in sizes])
    values = np.arange(BEYOND[-1] + 1)
    table = verify[np.minimum(np.searchsorted(sizes, values), len(sizes) - 1)]
    beyond = values > CAPTURED[-1]
    table[beyond] = np.interp(values[beyond], BEYOND, verify[len(CAPTURED) :])
    draft = [0.0] + [
        1e3 * world.draft_s(drafter, Pass(n * (1 + k), n, PROFILE_CONTEXT, n), k) for n in range(1, requests + 1)
    ]
    return CostTables(np.array(draft), table)


def _verify_ms(world: World, tokens: int, k: int) -> float:
    requests = max(1, -(-tokens // (1 + k)))
    return 1e3 * world.target_s(Pass(tokens, requests, PROFILE_CONTEXT, tokens))
