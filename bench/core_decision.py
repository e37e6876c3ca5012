"""What views, decision and observation of a step cost together, with requests coming and going.

    python -m bench.core_decision        writes results/core_decision.json

Thread CPU time of the mean step, each over five runs with Poisson churn; nothing else of the engine is counted.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.cost.model import DrafterCost, LatencyModel, StepCost
from outrider_runtime.control.data.batch import NOBODY, Batch
from outrider_runtime.control.data.forest import chains, trials
from outrider_runtime.control.data.plans import ExecutionMode, Outcome
from outrider_runtime.control.settings import Drafter, HotSettings, Settings, SLOClass
from outrider_runtime.control.warm_up import compile_all

RUNS, WARM_STEPS, STEPS = 5, 100, 400
LENGTH = 5
BARS_US = {(1, 1): 60, (64, 1): 100, (256, 1): 300, (64, 3): 200, (256, 3): 600}
"""(batch, drafters with passes) -> microseconds."""
COLUMNS = ("slo_class", "context", "prompt", "prompt_left", "left", "emitted")
RESULT = Path(__file__).parent / "results" / "core_decision.json"


class Serving:
    """An engine's books by slot, kept by the engine anyway; what is timed is how a `Batch` is taken from them."""

    def __init__(self, batch: int, models: int, classes: bool, seed: int) -> None:
        self.batch, self.rng = batch, np.random.default_rng(seed)
        self.drafters = tuple(Drafter(f"model{d}", passes=True, needs_hidden=True) for d in range(models))
        slo = (SLOClass("chat", 0.08), SLOClass("bulk", 1.0)) if classes else ()
        self.slots = 2 * batch
        settings = Settings(
            self.drafters, LENGTH, self.slots, hot=HotSettings(max_draft_tokens=LENGTH, slo_classes=slo)
        )
        cost = StepCost(
            per_batched_token_s=2e-6, per_batched_token_above_knee_s=4e-5, knee_tokens=2.5 * batch, constant_s=8e-3
        )
        passes = DrafterCost(StepCost(per_batched_token_s=1e-6, constant_s=3e-4))
        model = LatencyModel(dict.fromkeys(ExecutionMode, cost), {drafter.name: passes for drafter in self.drafters})
        compile_all(settings)
        self.loop = Controller(settings, model, clock=time.perf_counter, rng=np.random.default_rng([seed, 1]))
        self.books = np.zeros((len(COLUMNS), self.slots), np.int64)
        self.first_at = np.zeros(self.slots)
        self.running = np.zeros(self.slots, bool)
        self.alpha = self.rng.uniform(0.4, 0.9, (models, self.slots))
        self.proposed = np.zeros(self.slots, np.int64)
        self.drafter = np.full(self.slots, NOBODY)
        self.asked = np.full((2, self.slots), NOBODY)
        self.plan: Any = None
        self.now, self.lengths = 0.0, 120

    def step(self) -> float:
        """Seconds of thread CPU time of what the loop costs in one step."""
        self._come_and_go()
        rows = np.flatnonzero(self.running)
        started = time.thread_time()
        batch = self._view(rows)
        lengths = self.proposed[rows]
        plan = self.plan if self.plan is not None else self.loop.plan_draft(batch)
        forest = chains(
            np.minimum(lengths, np.maximum(batch.left - 1, 0)), self.drafter[rows], plan, self.asked.take(rows, axis=1)
        )
        verify = self.loop.plan_verify(batch, forest)
        spent = time.thread_time() - started
        accepted = self._accept(batch, forest, verify.nodes)
        started = time.thread_time()
        draft = self.loop.plan_draft(batch)
        spent += time.thread_time() - started
        outcome = self._outcome(batch, draft, verify, forest, accepted)
        started = time.thread_time()
        self.loop.observe(outcome)
        ended = rows[self.books[4, rows] <= 0]
        if len(ended):
            self.loop.release(ended)
        spent += time.thread_time() - started
        self.running[ended] = False
        self._propose(rows, draft)
        return spent

    def _view(self, rows: np.ndarray) -> Batch:
        columns = self.books.take(rows, axis=1)
        elapsed_s = np.where(columns[5] > 0, self.now - self.first_at[rows], 0.0)
        models = len(self.drafters)
        missing = np.maximum(columns[2], 1)[None].repeat(models, 0)
        slo_class, context, prompt, prompt_left, left, emitted = columns
        return Batch(
            rows, slo_class, context, prompt, prompt_left, left, emitted, elapsed_s, missing, self.now, 8192,
            10**7,
        )  # fmt: skip

    def _come_and_go(self) -> None:
        """One comes for each that goes on average, and the batch stays near its size."""
        free = np.flatnonzero(~self.running)
        mean = self.batch / self.lengths * 1.6 if self.running.any() else 0
        come = self.batch if not self.running.any() else int(self.rng.poisson(mean))
        come = max(0, min(come, self.batch - int(self.running.sum()) + 4))
        slots = free[:come]
        self.running[slots] = True
        self.books[:, slots] = 0
        self.books[0, slots] = self.rng.integers(0, 2, len(slots)) if self.loop.settings.hot.slo_classes else NOBODY
        self.books[2, slots] = 128  # its prompt is read in one step
        self.books[4, slots] = self.rng.geometric(1 / self.lengths, len(slots)) + 1
        self.proposed[slots], self.drafter[slots], self.asked[:, slots] = 0, NOBODY, NOBODY

    def _accept(self, batch: Batch, forest: Any, nodes: np.ndarray) -> np.ndarray:
        chance = self.alpha[forest.drafter, batch.slot[forest.request]]
        missed = ~(nodes & (self.rng.random(len(forest)) < chance))
        first = np.full(len(batch), 10**6)
        np.minimum.at(first, forest.request[missed], forest.depth[missed])
        return np.asarray(forest.depth < first[forest.request])

    def _outcome(self, batch: Batch, draft: Any, verify: Any, forest: Any, accepted: np.ndarray) -> Outcome:
        rows, lengths = batch.slot, np.bincount(forest.request[accepted], minlength=len(batch))
        gained = 1 + lengths
        tokens = len(batch) + int(verify.lengths.sum()) + int(batch.prompt.sum())
        target_s = 8e-3 + 2e-6 * tokens + 4e-5 * max(0, tokens - 2.5 * self.batch)
        drafts_s = np.where(draft.passes > 0, 3e-4 * draft.passes, np.nan)
        step_s = (target_s + float(np.nansum(drafts_s))) * self.rng.normal(1, 0.02) + 3e-4
        self.now += step_s
        self.books[1, rows] += np.where(batch.prompt > 0, batch.prompt, gained)
        self.books[2, rows] = 0
        self.first_at[rows[batch.emitted == 0]] = self.now
        self.books[5, rows] += gained
        self.books[4, rows] -= gained
        even = not batch.prompt.any() and len(set(verify.lengths.tolist())) == 1
        mode = ExecutionMode.UNIFORM if even else ExecutionMode.RAGGED
        return Outcome(
            self.now, step_s, target_s, drafts_s, mode, int(gained.sum()), batch, draft, verify.purpose, forest,
            verify.nodes, accepted, trials(forest, verify.nodes, accepted),
        )  # fmt: skip

    def _propose(self, rows: np.ndarray, draft: Any) -> None:
        self.plan = draft
        self.asked[:, rows] = NOBODY
        self.asked[: len(draft.asked), rows] = draft.asked
        first = self.asked[0, rows]
        self.drafter[rows] = first
        self.proposed[rows] = np.where(first >= 0, draft.passes[first], 0)


def measure(batch: int, models: int, *, classes: bool) -> dict[str, Any]:
    """Microseconds of a step: the mean over all runs, and each run's mean."""
    means, speculates = [], []
    for run in range(RUNS):
        serving = Serving(batch, models, classes, seed=run)
        for _ in range(WARM_STEPS):
            serving.step()
        spent = []
        for _ in range(STEPS):
            spent.append(serving.step())
            speculates.append(bool(serving.plan.passes.any()))
        means.append(1e6 * float(np.mean(spent)))
    return {
        "batch": batch, "drafters": models, "slo_classes": classes, "mean_us": round(float(np.mean(means)), 1),
        "runs_us": [round(mean, 1) for mean in means], "bar_us": BARS_US[batch, models],
        "speculating_share": round(float(np.mean(speculates)), 3),
    }  # fmt: skip


def main() -> None:
    rows = [measure(*key, classes=classes) for key in BARS_US for classes in (False, True)]
    for row in rows:
        print(row)
    RESULT.write_text(json.dumps({"steps": STEPS, "runs": RUNS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
