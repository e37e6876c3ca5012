"""AdaServe's setting (section 6) replayed: three SLO classes by TPOT at rising rates, then only urgent requests.

    python -m bench.papers.adaserve [--resume]        writes bench/papers/results/adaserve.json

It takes most of an hour of a core, and writes after each world; --resume measures those that the file lacks.
Llama-3.1-8B and 70B on A100s stand in for Llama-2, an EAGLE-3 head for the paper's small model. As in the paper,
attainment counts TPOT alone, goodput counts the tokens of requests that met it, and no request is held back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from outrider_runtime.control.settings import SLOClass
from outrider_runtime.simulate.replay.engine import ReplayEngine
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_classes, open_load, poisson

from bench.replay import trees
from bench.replay.plan import capacity, step_s
from bench.replay.settings import recording
from bench.replay.trees import Place, System

RESULT = Path(__file__).parent / "results" / "adaserve.json"
PLACES = tuple(
    Place(name, acceptance) for name in ("llama-3.1-8b-a100", "llama-3.1-70b-4xa100") for acceptance in (0.5, 0.7)
)
"""Acceptance rates are assumed: the paper does not give those of its small models."""
TPOTS = (("tight", 1.0, 0.6), ("middle", 4.0, 0.2), ("loose", 8.0, 0.2))
"""TPOT in steps of plain decoding at batch BASE_BATCH, and shares of the requests."""
BASE_BATCH = 8
RATES = (0.2, 0.4, 0.5, 0.6, 0.7)
"""Shares of what plain decoding can serve."""
URGENT, URGENT_RATE = (1.0, 0.8, 0.6), 0.1
LENGTHS, REQUESTS, SEEDS = Lengths(300, 128), 150, 2
STATIC = (3, 5)
OURS_CHAINS, OURS_TREES, BEST_CHAIN = "our chains", "our trees", "best static chain"
BETWEEN, MOST_MISSES = (0.50, 0.95), 0.8
PAPER = {
    "attainment by the best baseline's, at most": {"7B": 1.63, "13B": 1.66, "70B": 1.73},
    "goodput by the best baseline's, at most": {"7B": 1.51, "13B": 1.73, "70B": 1.74},
    "all urgent, 70B": {"0.8": 0.95, "0.6": 0.6},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Means over seeds."""

    tight: float
    """Share of the tight class that met its TPOT."""
    attained: float
    goodput: float
    """Tokens a second of requests that met their TPOT."""


def systems() -> list[System]:
    return [
        trees.plain_decoding(), *(trees.chain(k) for k in STATIC), trees.specinfer(), trees.adaserve(),
        trees.loop_system(OURS_CHAINS, trees.CHAINS), trees.loop_system(OURS_TREES, trees.TREES),
    ]  # fmt: skip


def classes(place: Place, tightness: Iterable[float]) -> tuple[SLOClass, ...]:
    base_s = step_s(place.world, BASE_BATCH)
    return tuple(SLOClass(f"{times:g} steps", times * base_s) for times in tightness)


def load(place: Place, share: float, shares: Sequence[float], seed: int) -> Workload:
    rng = np.random.default_rng([seed, 17])
    at_s = poisson(share * capacity(place.world), REQUESTS, rng)
    return draw_classes(open_load(at_s, recording(place.acceptance), None, rng, LENGTHS), np.array(shares), rng)


def cell(place: Place, system: System, share: float, targets: Mapping[float, float], seeds: int) -> Cell:
    """Replay one load. targets: TPOT in base steps -> share of the requests."""
    slo = classes(place, targets)
    engines = [
        trees.run(place, system, load(place, share, tuple(targets.values()), seed), seed, slo) for seed in range(seeds)
    ]
    return Cell(*np.mean([_figures(engine, slo) for engine in engines], axis=0).round(4).tolist())


def _figures(engine: ReplayEngine, slo: Sequence[SLOClass]) -> tuple[float, float, float]:
    load_ = engine.requests.load
    met = trees.tpot_s(engine) <= np.array([slo_class.tpot_s for slo_class in slo])[load_.slo_class]
    return float(met[load_.slo_class == 0].mean()), float(met.mean()), float(load_.output[met].sum() / engine.now)


def measure_place(place: Place, seeds: int) -> dict[str, Any]:
    mixed = {times: share for _, times, share in TPOTS}
    figures: dict[str, Any] = {"by rate": {}, "all urgent": {}}
    points = [("by rate", share, share, mixed) for share in RATES]
    points += [("all urgent", times, URGENT_RATE, {times: 1.0}) for times in URGENT]
    for part, key, share, targets in points:
        row = {row_cell.name: cell(place, row_cell, share, targets, seeds) for row_cell in systems()}
        figures[part][str(key)] = {name: cell_figures(row_cell) for name, row_cell in keep_best_chain(row).items()}
        print(place, part, key, {name: row_cell.tight for name, row_cell in row.items()}, flush=True)
    return figures


def keep_best_chain(row: Mapping[str, Cell]) -> dict[str, Cell]:
    """Replace the static chains by the one that attains most."""
    chains = {name: result for name, result in row.items() if name.startswith("chain,")}
    best = max(chains, key=lambda name: (chains[name].attained, chains[name].goodput))
    return {
        BEST_CHAIN: chains[best],
        **{name: result for name, result in row.items() if name not in chains},
    }


def cell_figures(result: Cell) -> dict[str, float]:
    return {"tight": result.tight, "attained": result.attained, "goodput": result.goodput}


def misses(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return misses of trees / misses of chains, where our chains attain 50 to 95% of the tight class."""
    rows = []
    for part in ("by rate", "all urgent"):
        for key, row in figures[part].items():
            chains, wide = row[OURS_CHAINS]["tight"], row[OURS_TREES]["tight"]
            inside = BETWEEN[0] <= chains <= BETWEEN[1]
            ratio = (1 - wide) / (1 - chains) if chains < 1 else float(wide < 1)
            most = MOST_MISSES if inside else 1.0
            rows.append({
                "part": part, "at": key, "chains": chains, "trees": wide, "misses": round(ratio, 3), "most": most,
                "holds": bool(ratio <= most),
            })  # fmt: skip
    return rows


def read_earlier_worlds(options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the worlds of a run that was stopped; none if its requests or seeds differ."""
    if not RESULT.exists():
        return {}
    stored: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return stored["worlds"] if all(stored[key] == options[key] for key in ("requests", "seeds")) else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, help="ignored: this benchmark always runs to its end")
    parser.add_argument("--resume", action="store_true", help="keep the worlds that the file has, if of as many seeds")
    options = parser.parse_args()
    figures: dict[str, Any] = {"paper": PAPER, "requests": REQUESTS, "seeds": options.seeds, "worlds": {}}
    if options.resume:
        figures["worlds"] = read_earlier_worlds(figures)
    for place in PLACES:
        if str(place) in figures["worlds"]:
            continue
        place_figures = measure_place(place, options.seeds)
        figures["worlds"][str(place)] = {
            "budget": trees.budget(place, 0),
            **place_figures,
            "misses": misses(place_figures),
        }
        RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    for name, world in figures["worlds"].items():
        for row in world["misses"]:
            print(name, row)


if __name__ == "__main__":
    main()
