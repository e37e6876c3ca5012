"""How long the controller takes to decide: plan_verify and plan_draft together, one engine step.

    python -m tests.benchmarks.controller_decision

writes results/controller_decision.json and .png. Bars: under 200 microseconds median at batch 64 and K = 8, under
1 ms at batch 256. The costs are a GPU's, where most positions are worth verifying: the largest ranking there is. On a
machine that others use too, the fastest tenth of the steps is closer to what a decision takes than the median.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
from outrider_runtime.control.batch import (
    Batch,
    DraftPlan,
    ExecutionMode,
    RequestOutcome,
    RequestView,
    StepOutcome,
    VerifyPlan,
)
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import DrafterCost, LatencyModel, StepCost
from outrider_runtime.control.settings import DrafterSpec, HotSettings, Settings

RESULTS = Path(__file__).parent / "results"
DRAFT_TOKENS = 8
BATCHES = (1, 8, 16, 64, 256)
BARS_US = {64: 200.0, 256: 1000.0}
STEPS = 400
TARGET = StepCost(1e-8, 4e-6, 2e-5, 256.0, 1e-6, 0.0, 8e-3)
DRAFT = DrafterCost(StepCost(1e-9, 4e-7, 0.0, 0.0, 0.0, 0.0, 4e-4))
LOOKUP = DrafterCost(StepCost(constant_s=1e-4, per_request_s=2e-6), autoregressive=False)


@dataclass(frozen=True)
class Point:
    batch: int
    draft_tokens: int
    median_us: float
    fastest_tenth_us: float
    mean_us: float
    """A new choice every few steps takes several times the median."""
    p99_us: float
    observe_median_us: float
    mean_chosen_length: float
    bar_us: float | None


def measure(batch_size: int) -> Point:
    controller = _controller()
    rng = np.random.default_rng(1)
    decisions, observations, lengths = [], [], []
    outcome = None
    for step in range(STEPS):
        batch = _batch(batch_size, step)
        started = time.perf_counter()
        verify = controller.plan_verify(batch)
        draft = controller.plan_draft(batch)
        decided = time.perf_counter()
        outcome = _outcome(batch, verify, draft, rng, step)
        before = time.perf_counter()
        controller.observe(outcome)
        observations.append(time.perf_counter() - before)
        decisions.append(decided - started)
        lengths.append(np.mean(verify.lengths))
    return Point(
        batch=batch_size,
        draft_tokens=DRAFT_TOKENS,
        median_us=round(1e6 * float(np.median(decisions)), 1),
        fastest_tenth_us=round(1e6 * float(np.percentile(decisions, 10)), 1),
        mean_us=round(1e6 * float(np.mean(decisions)), 1),
        p99_us=round(1e6 * float(np.percentile(decisions, 99)), 1),
        observe_median_us=round(1e6 * float(np.median(observations)), 1),
        mean_chosen_length=round(float(np.mean(lengths)), 2),
        bar_us=BARS_US.get(batch_size),
    )


def _controller() -> Controller:
    modes = dict.fromkeys(ExecutionMode, TARGET)
    hot = HotSettings(max_draft_tokens=DRAFT_TOKENS)
    pool = (DrafterSpec("prompt-lookup", neural=False), DrafterSpec("eagle", neural=True))
    return Controller(
        Settings(pool, DRAFT_TOKENS, largest_graph_tokens=512, hot=hot),
        LatencyModel(modes, {"eagle": DRAFT, "prompt-lookup": LOOKUP}),
        clock=time.perf_counter,
        rng=np.random.default_rng(0),
    )


def _batch(size: int, step: int) -> Batch:
    views = tuple(
        RequestView(
            id=f"request-{number}", slo_class=("chat", "batch")[number % 2], context_tokens=200 + 7 * number + step,
            prefill_tokens=0, prefill_left=0, output_tokens=step, remaining_tokens=400, elapsed_s=0.01 * step,
            proposed=DRAFT_TOKENS if step else 0, drafter="eagle" if number % 4 else "prompt-lookup", draft_ready=True,
        )
        for number in range(size)
    )  # fmt: skip
    return Batch(views, now=0.01 * step, token_budget=8192, free_kv_tokens=1_000_000)


def _outcome(batch: Batch, verify: VerifyPlan, draft: DraftPlan, rng: np.random.Generator, step: int) -> StepOutcome:
    hazards = rng.uniform(0.5, 0.95, len(batch.requests))
    requests = []
    for view, length, hazard in zip(batch.requests, verify.lengths, hazards, strict=True):
        accepted = min(length, int(rng.geometric(1 - hazard)) - 1)
        requests.append(
            RequestOutcome(view.id, view.slo_class, view.drafter, DRAFT_TOKENS, view.proposed, length, accepted)
        )
    size = len(requests)
    batched = size + sum(verify.lengths)
    context = sum(view.context_tokens for view in batch.requests)
    return StepOutcome(
        now=0.01 * step, step_s=0.012, target_s=0.009, n_context=context, n_batched=batched, n_requests=size,
        n_decoding=size, mode=ExecutionMode.RAGGED, tokens=size + sum(request.accepted for request in requests),
        verify_plan=verify, draft_plan=draft, requests=tuple(requests), draft_s={"eagle": 0.002, "prompt-lookup": 1e-4},
    )  # fmt: skip


def plot(points: list[Point], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    sizes = [point.batch for point in points]
    axes.plot(sizes, [point.median_us for point in points], marker="o", label="median")
    axes.plot(sizes, [point.p99_us for point in points], marker="^", linestyle=":", label="99th percentile")
    for batch, bar in BARS_US.items():
        axes.plot([batch], [bar], marker="_", markersize=24, color="black")
    axes.set(xscale="log", yscale="log", xlabel="requests in the batch", ylabel="microseconds a step")
    axes.set_title(f"Deciding drafter and lengths, K = {DRAFT_TOKENS} (black: the bars)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    measure(8)  # warm up
    points = [measure(size) for size in BATCHES]
    for point in points:
        print(point)
    document = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "numpy": np.__version__,
        "points": [asdict(point) for point in points],
    }
    (RESULTS / "controller_decision.json").write_text(json.dumps(document, indent=2) + "\n")
    plot(points, RESULTS / "controller_decision.png")


if __name__ == "__main__":
    main()
