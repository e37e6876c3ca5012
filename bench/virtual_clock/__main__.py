"""Whether the replay's scheduler is vLLM's: python -m bench.virtual_clock [--seeds N]

Each cell runs the same requests twice: in the replay, and in vLLM's engine core with its real scheduler and KV cache
manager, stock or with the loop in it. A stand-in for the executor plays the recorded tokens there and moves the clock
by the world's times. Writes results/virtual_clock.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench.virtual_clock.both_engines import serve_in_both
from bench.virtual_clock.cells import Cell, cells
from bench.virtual_clock.engine import Served

RESULTS = Path(__file__).parents[1] / "results" / "virtual_clock.json"
MOST_LATENCY, MOST_LENGTH = 0.03, 0.1
"""Largest differences: of the mean latency, as a share, and of the mean proposals verified per request and step."""


@dataclass(frozen=True, slots=True)
class Judged:
    cell: Cell
    replayed: tuple[Served, ...]
    """Results by seed."""
    served: tuple[Served, ...]

    @property
    def latency(self) -> float:
        """Mean latency in the engine / in the replay - 1."""
        return _mean(self.served, "latency_s") / _mean(self.replayed, "latency_s") - 1

    @property
    def length(self) -> float:
        return _mean(self.served, "draft_length") - _mean(self.replayed, "draft_length")

    @property
    def holds(self) -> bool:
        return abs(self.latency) <= MOST_LATENCY and abs(self.length) <= MOST_LENGTH

    def line(self) -> str:
        lengths = f"K {_mean(self.served, 'draft_length'):.2f} ({self.length:+.2f})"
        preempted = sum(run.preempted for run in self.served), sum(run.preempted for run in self.replayed)
        more = f", {preempted[0]} preempted ({preempted[1]})" if any(preempted) else ""
        return f"{'holds ' if self.holds else 'MISSED'} {self.cell}: latency {self.latency:+.1%}, {lengths}{more}"


def _mean(runs: Sequence[Served], name: str) -> float:
    return float(np.mean([getattr(run, name) for run in runs]))


def compare(cell: Cell, seeds: int, processes: Executor) -> Judged:
    futures = [processes.submit(serve_in_both, cell, seed) for seed in range(seeds)]
    replayed, made = zip(*(future.result() for future in futures), strict=True)
    return Judged(cell, replayed, made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as processes:
        measure(options.seeds, processes)
    return 0


def measure(seeds: int, processes: Executor) -> None:
    rows = []
    for cell in cells():
        judged = compare(cell, seeds, processes)
        print(judged.line(), flush=True)
        rows.append(
            {
                "cell": str(cell), "latency": round(judged.latency, 4), "length": round(judged.length, 3),
                "draftLength": round(_mean(judged.served, "draft_length"), 3), "holds": judged.holds,
            }
        )  # fmt: skip
        RESULTS.write_text(json.dumps({"seeds": seeds, "cells": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
