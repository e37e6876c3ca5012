"""What an engine with a draft model costs while it does not speculate, against plain vLLM.

    python -m tests.benchmarks.skip_draft_at_k0 [--rounds N]

writes results/skip_draft_at_k0.json and .png. Bar: throughput pinned at k = 0 is at least 0.97 of stock vLLM without
speculation. Stock vLLM's own dynamic table at K = 0 is there to compare: it still runs the draft's forward.

Every engine is vLLM's multi-process one, as in a pod. All are up at the same time and take turns, one short run each
and in changing order, so that a noisy machine is noisy for all of them; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import matplotlib

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 8)
TOKENS = 48
ROUNDS = 15
BAR = 0.97
PLAIN, OURS, STOCK_TABLE = "stock, no speculation", "Outrider, k = 0", "stock, dynamic table at K = 0"
ARMS = (PLAIN, OURS, STOCK_TABLE)
PROMPT = "The lighthouse keeper wrote in his log: day {}, the sea was calm and"


@dataclass(frozen=True)
class Point:
    arm: str
    batch: int
    tokens_per_s: list[float]
    """One value a round."""
    median_tokens_per_s: float
    ratio: float
    """Median over the rounds of this arm's throughput by the plain engine's."""
    ratio_quartiles: tuple[float, float]


# -- one arm: a process of its own that runs a batch when told ------------------------------------------------------


def serve_arm(arm: str) -> None:
    """Start the arm's engine; then read batch sizes from stdin, one a line, and answer with seconds."""
    llm = start_engine(arm)
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    print("READY", flush=True)
    for line in sys.stdin:
        prompts = [PROMPT.format(number) for number in range(int(line))]
        began = time.perf_counter()
        llm.generate(prompts, greedy, use_tqdm=False)
        print(f"SECONDS {time.perf_counter() - began}", flush=True)


def start_engine(arm: str) -> Any:
    from outrider_crds.spec import Dtype, SpeculationMode
    from outrider_runtime.vllm_plugin import arguments as of_engine
    from outrider_runtime.vllm_plugin import launch

    from tests.engine import engines

    plan = engines.make_plan([engines.eagle()], hot=engines.hot_config(SpeculationMode.OFF))
    engine = plan.boot.engine.model_copy(update={"dtype": Dtype.AUTO})
    plan = plan.model_copy(update={"boot": plan.boot.model_copy(update={"engine": engine})})
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    launch.prepare(plan)
    arguments = of_engine.engine_arguments(plan)
    if arm != OURS:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM's own on a CPU
        arguments = [one for one in arguments if not one.startswith(("--scheduler-cls", "--worker-cls"))]
        arguments = [one for one in arguments if not one.startswith("--speculative-config")]
    if arm == STOCK_TABLE:
        config = of_engine.speculative_config(plan)
        assert config is not None
        config["num_speculative_tokens_per_batch_size"] = [[1, 256, 0]]
        arguments.append(f"--speculative-config={json.dumps(config)}")
    return engines.start(arguments)


class Arm:
    def __init__(self, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.skip_draft_at_k0", "--arm", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer("READY")

    def tokens_per_s(self, batch: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        return batch * TOKENS / float(self._answer("SECONDS"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError(f"the engine of {self.name!r} ended; see its log above")


# -- the comparison ---------------------------------------------------------------------------------------------------


def measure(arms: list[Arm], rounds: int) -> list[Point]:
    order = random.Random(0)
    seen: dict[tuple[str, int], list[float]] = {(arm.name, batch): [] for arm in arms for batch in BATCHES}
    for number in range(rounds + 1):
        for batch in BATCHES:
            for arm in order.sample(arms, len(arms)):
                speed = arm.tokens_per_s(batch)
                if number:  # the first round warms up
                    seen[arm.name, batch].append(speed)
        print(f"round {number} of {rounds}", flush=True)
    return [point(name, batch, seen) for name, batch in seen]


def point(name: str, batch: int, seen: dict[tuple[str, int], list[float]]) -> Point:
    speeds = seen[name, batch]
    ratios = [ours / plain for ours, plain in zip(speeds, seen[PLAIN, batch], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return Point(
        arm=name,
        batch=batch,
        tokens_per_s=[round(speed, 1) for speed in speeds],
        median_tokens_per_s=round(median(speeds), 1),
        ratio=round(median(ratios), 3),
        ratio_quartiles=(round(low, 3), round(high, 3)),
    )


def plot(points: list[Point], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for offset, arm in enumerate(ARMS):
        mine = [point for point in points if point.arm == arm]
        places = [index + 0.25 * offset for index in range(len(mine))]
        spread = [[p.ratio - p.ratio_quartiles[0] for p in mine], [p.ratio_quartiles[1] - p.ratio for p in mine]]
        axes.bar(places, [p.ratio for p in mine], width=0.23, yerr=spread, capsize=3, label=arm)
    axes.axhline(BAR, color="black", linestyle=":", label=f"bar {BAR}")
    axes.set_xticks([index + 0.25 for index in range(len(BATCHES))], [f"{batch} requests" for batch in BATCHES])
    axes.set_ylabel("throughput / plain vLLM's")
    axes.legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        serve_arm(options.arm)
        return
    arms = [Arm(name) for name in ARMS]
    try:
        points = measure(arms, options.rounds)
    finally:
        for arm in arms:
            arm.close()
    RESULTS.mkdir(exist_ok=True)
    met = all(one.ratio >= BAR for one in points if one.arm == OURS)
    document = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "bar": BAR,
        "met": met,
        "points": [asdict(one) for one in points],
    }
    (RESULTS / "skip_draft_at_k0.json").write_text(json.dumps(document, indent=2) + "\n")
    plot(points, RESULTS / "skip_draft_at_k0.png")
    for one in points:
        print(f"{one.arm:32} {one.batch:2} requests {one.median_tokens_per_s:8} tok/s  ratio {one.ratio}")


if __name__ == "__main__":
    main()
