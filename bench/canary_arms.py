"""Whether a draft canary favours an arm: two equal pools must have a gain of 0.

    python -m bench.canary_arms               writes results/canary_arms.json (about two minutes of one core)
    python -m bench.canary_arms --case equal  runs one and replaces its rows

The loop serves both arms in one engine on a virtual clock. The gain is the
candidate's speed-up / the stable arm's - 1. Twenty seeds run at each batch; worse candidates, also under bursts of
requests, are the comparison.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.unit.control.engine import Engine, World
from tests.unit.control.test_arms import canaried, gain, sums, world

SEEDS = 20
STEPS = {1: 1000, 8: 250, 64: 300}
"""Steps of a run, by batch."""
RESULT = Path(__file__).parent / "results" / "canary_arms.json"
Row = dict[str, float | str | int]


class Case(NamedTuple):
    world: World
    candidate_percent: int = 50
    is_asynchronous: bool = False
    """Are steps scheduled ahead?"""
    bursts: bool = False
    """Do as many requests come together, and the next ones when all of them are over?"""
    batches: tuple[int, ...] = tuple(STEPS)


CASES = {
    "equal": Case(world()),
    "equal, asynchronous": Case(world(), is_asynchronous=True),
    "equal, 20% candidate": Case(world(), candidate_percent=20, batches=(8,)),
    "half the acceptance": Case(world(new=0.375, lookup=0.4)),
    "lower acceptance, bursts": Case(world(new=0.6), bursts=True, batches=(64,)),
    "equal, bursts": Case(world(), bursts=True, batches=(64,)),
    "half the acceptance, strong lookup": Case(world(new=0.375), batches=(64,)),
}


def measure_gain(name: str, batch: int) -> Row:
    case, gains, requests, began_s = CASES[name], list[float](), 0.0, time.thread_time()
    for seed in range(SEEDS):
        percent, ahead = case.candidate_percent, case.is_asynchronous
        loop, arms = canaried(seed=seed, percent=percent, scores_placeholders=ahead)
        steps = STEPS[batch] * (2 if case.bursts else 1)
        Engine(case.world, loop, load=batch, seed=seed, arms=arms, bursts=case.bursts).run(steps)
        gains.append(100 * gain(arms))
        requests += sum(arm.requests for arm in sums(arms)) / SEEDS
    mean, error = float(np.mean(gains)), float(np.std(gains, ddof=1) / np.sqrt(SEEDS))
    return {
        "case": name, "batch": batch, "gainPercent": round(mean, 3), "standardError": round(error, 3),
        "requests": round(requests), "cpuSeconds": round(time.thread_time() - began_s),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.canary_arms", description=__doc__)
    parser.add_argument("--case", choices=list(CASES), help="run this one and replace its rows; default: all")
    case = parser.parse_args().case
    names = [case] if case else list(CASES)
    stored: list[Row] = json.loads(RESULT.read_text()) if RESULT.exists() else []
    rows = {name: [row for row in stored if row["case"] == name] for name in CASES}
    for name in names:
        rows[name] = []
        for batch in CASES[name].batches:
            rows[name].append(measure_gain(name, batch))
            print(rows[name][-1], flush=True)
        RESULT.write_text(json.dumps([row for name in CASES for row in rows[name]], indent=1) + "\n")


if __name__ == "__main__":
    main()
