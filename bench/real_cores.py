"""A smoke benchmark on real cores: what a token costs stock vLLM, and what it costs with the loop.

    python -m bench.real_cores [--rounds N]

writes results/real_cores.json. At 1, 8 and 24 requests it compares stock vLLM (its first model runner) without
speculation and with each static setting, and ours with a pool of prompt lookup and EAGLE-3, left to itself and pinned
to each of these settings. Each engine is a process with one thread. All are up at one time and take turns in changing
order, so that noise of the machine meets all of them. CPU time and wall time are raw, one value per round; ratios are
taken within a round.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

RESULTS = Path(__file__).parent / "results" / "real_cores.json"
BATCHES = (1, 8, 24)
TOKENS = 48
ROUNDS = 9
STOCK = "stock, no speculation"
STATIC: dict[str, dict[str, object]] = {
    "stock, lookup, k = 3": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "stock, eagle, k = 3": {"method": "eagle3"},
}
OURS = "ours"
FIXED_LENGTHS: dict[str, tuple[int, str | None]] = {
    "ours, k = 0": (0, None),
    "ours, lookup, k = 3": (3, "pld"),
    "ours, eagle, k = 3": (3, "eagle"),
}
"""Arms of ours: draft length and drafter that its loop is pinned to."""
STOCKS = (STOCK, *STATIC)
ALIKE = dict(zip(FIXED_LENGTHS, STOCKS, strict=True))
ARMS = (*STOCKS, OURS, *FIXED_LENGTHS)
PROMPTS = (
    "The lighthouse keeper wrote in his log: day {}, the sea was calm and",
    "def test_{0}():\n    assert add({0}, 1) == 1 + {0}\n\ndef test_{0}_again():\n    assert add({0}, 2) ==",
    "one two three four five six seven eight nine ten {} one two three four",
)


# -- one engine: a process of its own that runs a batch on command -----------------------------------------------------


def serve(engine: str) -> None:
    """Start the engine; then read a batch size and an arm from each line of stdin, and print CPU and wall seconds."""
    llm = start_engine(engine)
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def run(batch: int, arm: str) -> None:
        if engine == OURS:
            llm.llm_engine.engine_core.engine_core.scheduler.outrider.pin(*FIXED_LENGTHS.get(arm, (None,)))
        llm.generate(prompts(batch), greedy, use_tqdm=False)

    answer(run)


def answer(run: Callable[[int, str], None]) -> None:
    """Time `run` at each batch size and arm that stdin names."""
    print("READY", flush=True)
    for line in sys.stdin:
        batch, arm = line.strip().split(" ", maxsplit=1)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        run(int(batch), arm)
        print(f"SECONDS {time.process_time() - cpu_s} {time.perf_counter() - wall_s}", flush=True)


def prompts(batch: int) -> list[str]:
    return [PROMPTS[number % len(PROMPTS)].format(number) for number in range(batch)]


def prepare_process() -> None:
    """Set this process up for one engine, with one thread and quiet logs."""
    from tests.engine.engines import hide_dunders_of_llvmlite

    os.environ.update(
        OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    hide_dunders_of_llvmlite()


def start_engine(name: str) -> Any:
    from outrider_runtime.vllm_plugin import arguments as of_engine
    from outrider_runtime.vllm_plugin import launch

    from tests.engine import engines

    prepare_process()
    plan = engines.make_plan([engines.lookup(), engines.eagle()], extra=[f"--max-num-seqs={max(BATCHES)}"])
    if name == OURS:
        launch.prepare(plan)
        return engines.start(of_engine.engine_arguments(plan))
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM's own on a CPU
    ours = ("--scheduler-cls", "--worker-cls", "--speculative-config")
    arguments = [argument for argument in of_engine.engine_arguments(plan) if not argument.startswith(ours)]
    if name in STATIC:
        config: dict[str, object] = {**STATIC[name], "num_speculative_tokens": 3}
        if config["method"] == "eagle3":
            config["model"] = str(engines.EAGLE_HEAD)
        arguments.append(f"--speculative-config={json.dumps(config)}")
    return start_stock(arguments)


def start_stock(arguments: list[str]) -> Any:
    """Start vLLM with the same arguments, without Outrider."""
    from outrider_runtime.vllm_plugin.versions import make_arg_parser
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", *arguments])
    return LLM.from_engine_args(EngineArgs.from_cli_args(parsed))


class Engine:
    def __init__(self, name: str, benchmark: str = "real_cores") -> None:
        """benchmark: the module that serves the engine of that name."""
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.{benchmark}", "--engine", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer("READY")

    def run(self, batch: int, arm: str) -> tuple[float, float]:
        """Run a batch; return CPU and wall milliseconds per token."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {arm}\n")
        self._process.stdin.flush()
        cpu_s, wall_s = map(float, self._answer("SECONDS").split())
        return 1000 * cpu_s / (batch * TOKENS), 1000 * wall_s / (batch * TOKENS)

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


@dataclass(frozen=True)
class Seen:
    """Milliseconds per token of one arm at one batch size, one value per round."""

    arm: str
    batch: int
    cpu_ms: list[float]
    wall_ms: list[float]


def measure(engines: Mapping[str, Engine], rounds: int) -> list[Seen]:
    order = random.Random(0)
    seen = {(arm, batch): Seen(arm, batch, [], []) for arm in ARMS for batch in BATCHES}
    for number in range(rounds + 1):
        for batch in BATCHES:
            for arm in order.sample(ARMS, len(ARMS)):
                cpu_ms, wall_ms = engines[arm if arm in STOCKS else OURS].run(batch, arm)
                if number:  # the first round warms up
                    seen[arm, batch].cpu_ms.append(round(cpu_ms, 3))
                    seen[arm, batch].wall_ms.append(round(wall_ms, 3))
        print(f"round {number} of {rounds}", flush=True)
    return list(seen.values())


def compare(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """Return ratios ours / stock, at each setting, and left to itself against stock's best: median and quartiles."""
    ratios = []
    for batch in BATCHES:
        by_arm = {row.arm: row for row in seen if row.batch == batch}
        best = min(STOCKS, key=lambda name: median(by_arm[name].cpu_ms))
        for mine, other in (*ALIKE.items(), (OURS, STOCK), (OURS, best)):
            for figure in ("cpu_ms", "wall_ms"):
                pairs = zip(getattr(by_arm[mine], figure), getattr(by_arm[other], figure), strict=True)
                low, middle, high = quantiles([ours_ms / other_ms for ours_ms, other_ms in pairs], n=4)
                ratios.append(
                    {"batch": batch, "of": mine, "by": other, "figure": figure, "ratio": round(middle, 3),
                     "quartiles": [round(low, 3), round(high, 3)]}
                )  # fmt: skip
    return ratios


@contextmanager
def engines_up(names: Iterable[str], benchmark: str = "real_cores") -> Iterator[dict[str, Engine]]:
    """Start all engines. They end with the context; if one does not start, those before it end, too."""
    with ExitStack() as ends:
        started: dict[str, Engine] = {}
        for name in names:
            started[name] = Engine(name, benchmark)
            ends.callback(started[name].close)
        yield started


def write(results: Path, seen: Sequence[Seen], ratios: Sequence[Mapping[str, Any]]) -> None:
    document = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
        "compared": ratios, "seen": [vars(row) for row in seen],
    }  # fmt: skip
    results.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 2")
    parser.add_argument("--engine", choices=(*STOCKS, OURS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options.engine)
        return
    with engines_up((*STOCKS, OURS)) as started:
        seen = measure(started, options.rounds)
    ratios = compare(seen)
    write(RESULTS, seen, ratios)
    for row in ratios:
        compared = f"{row['of']} / {row['by']}, {row['figure']}"
        print(f"{row['batch']:2} requests  {compared}: {row['ratio']} {row['quartiles']}")


if __name__ == "__main__":
    main()
