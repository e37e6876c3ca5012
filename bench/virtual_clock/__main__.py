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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from outrider_runtime.simulate.replay.engine import Engine

from bench.replay.settings import PROFILES, pool, profile
from bench.virtual_clock.cells import Cell, cells
from bench.virtual_clock.engine import Served, Stock, mean_draft_length, served

RESULTS = Path(__file__).parents[1] / "results" / "virtual_clock.json"
MOST_LATENCY, MOST_LENGTH = 0.03, 0.1
"""That the mean latency may differ, as a share, and the mean number of proposals verified of a request in a step."""


@dataclass(frozen=True, slots=True)
class Judged:
    cell: Cell
    replayed: tuple[Served, ...]
    """By seed."""
    served: tuple[Served, ...]

    @property
    def latency(self) -> float:
        """The engine's by the replay's, less 1."""
        return _mean(self.served, "latency_s") / _mean(self.replayed, "latency_s") - 1

    @property
    def length(self) -> float:
        return _mean(self.served, "draft_length") - _mean(self.replayed, "draft_length")

    @property
    def holds(self) -> bool:
        return abs(self.latency) <= MOST_LATENCY and abs(self.length) <= MOST_LENGTH

    def line(self) -> str:
        lengths = f"K {_mean(self.served, 'draft_length'):.2f} ({self.length:+.2f})"
        preempted = sum(one.preempted for one in self.served), sum(one.preempted for one in self.replayed)
        more = f", {preempted[0]} preempted ({preempted[1]})" if any(preempted) else ""
        return f"{'holds ' if self.holds else 'MISSED'} {self.cell}: latency {self.latency:+.1%}, {lengths}{more}"


def _mean(found: Sequence[Served], name: str) -> float:
    return float(np.mean([getattr(one, name) for one in found]))


def judge(cell: Cell, seeds: int) -> Judged:
    drafter, _, length = cell.system.partition(", k = ")
    stock = None if cell.system == "ours" else Stock(drafter, int(length)) if length else Stock()
    replayed, made = [], []
    for seed in range(seeds):
        load = cell.load(seed)
        replayed.append(_replayed(cell, seed))
        latency = profile(cell.case.world, pool(cell.case), seed % PROFILES)
        made.append(served(cell.setting(), load, stock, latency, asynchronous=cell.asynchronous))
    return Judged(cell, tuple(replayed), tuple(made))


def _replayed(cell: Cell, seed: int) -> Served:
    engine = Engine(cell.setting(), cell.load(seed), cell.policy().build(cell.case, seed))
    engine.run()
    requests = engine.requests
    latency_s = float((requests.done_s - requests.arrived_s).mean())
    return Served(latency_s, mean_draft_length(engine.log), requests.preemptions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for cell in cells():
        judged = judge(cell, options.seeds)
        print(judged.line(), flush=True)
        rows.append(
            {
                "cell": str(cell), "latency": round(judged.latency, 4), "length": round(judged.length, 3),
                "draftLength": round(_mean(judged.served, "draft_length"), 3), "holds": judged.holds,
            }
        )  # fmt: skip
        RESULTS.write_text(json.dumps({"seeds": options.seeds, "cells": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
