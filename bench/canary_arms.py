"""Whether the arms of a draft canary are compared without favour: two equal pools differ by nothing.

    python -m bench.canary_arms        writes results/canary_arms.json

The loop serves both arms in one engine on a virtual clock. The gain is the candidate's tokens / price by the stable
arm's, less 1. Twenty seeds at each batch; a candidate of half the acceptance for comparison.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.unit.control.engine import Engine, World
from tests.unit.control.test_arms import canaried, gain, sums, world

SEEDS = 20
STEPS = {1: 2500, 8: 800, 64: 250}
"""Steps of a run, by batch."""
RESULT = Path(__file__).parent / "results" / "canary_arms.json"
CASES: dict[str, tuple[World, int, bool]] = {
    "equal": (world(), 50, False),
    "equal, asynchronous": (world(), 50, True),
    "equal, 20% candidate": (world(), 20, False),
    "half the acceptance": (world(new=0.375), 50, False),
}
"""World, the candidate's share in percent, and whether steps are scheduled ahead."""


def measured(name: str, batch: int) -> dict[str, float | str | int]:
    of, percent, ahead = CASES[name]
    gains, requests = list[float](), 0.0
    for seed in range(SEEDS):
        loop, arms = canaried(seed=seed, percent=percent, scores_placeholders=ahead)
        Engine(of, loop, load=batch, seed=seed, arms=arms).run(STEPS[batch])
        gains.append(100 * gain(arms))
        requests += sum(arm.requests for arm in sums(arms)) / SEEDS
    mean, error = float(np.mean(gains)), float(np.std(gains, ddof=1) / np.sqrt(SEEDS))
    return {
        "case": name, "batch": batch, "gainPercent": round(mean, 3), "standardError": round(error, 3),
        "requests": round(requests),
    }  # fmt: skip


def main() -> None:
    rows = list[dict[str, float | str | int]]()
    for name in CASES:
        for batch in STEPS:
            rows.append(measured(name, batch))
            print(rows[-1], flush=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
