"""The judge of loads that change: vLLM's own scheduler on the virtual clock, asynchronous as on GPUs.

    python -m bench.virtual_clock.shifts     [--seeds N] [--shifts N]
    python -m bench.virtual_clock.shifts --tables     measures nothing: prints the Markdown of docs/results.md

Each load has phases (`bench.replay.plan.changing_loads`). The loop is compared with plain decoding in each phase; over
the whole run with the best static setting of the whole run, with that of each phase in hindsight, and with vLLM's
adaptive verification. The replay finds the best settings over a few seeds; here they are served.

A phase's speed is 1 / mean latency of the requests that came in it; where more comes than can be served, their tokens
per second. A run's speed is the geometric mean over its phases, weighted by their requests. A ratio is ours / the
other's. Writes results/shifts.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.host_costs import host_costs
from bench.replay.bars import best_on_means, geometric_mean, low_quantile
from bench.replay.cells import run
from bench.replay.phases import Shift, load, speeds
from bench.replay.plan import changing_loads
from bench.replay.settings import LONGEST, PROFILES, VARLEN_GRAPHS, pool, profile, singles
from bench.virtual_clock.cells import Cell
from bench.virtual_clock.engine import Stock, serve
from bench.virtual_clock.judge import ADAPTIVE, BEST, OURS, PLAIN, host_system, stock

RESULTS = Path(__file__).parents[1] / "results" / "shifts.json"
SCREENING_SEEDS = 2
HINDSIGHT = "hindsight"
LEAST = {PLAIN: 0.99, BEST: 1.00}
"""Least 5% quantile over seeds: of plain decoding in each phase, of the best static setting over the whole run."""

Speeds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class JudgedShift:
    """speeds: system -> (seeds, phases). best: the static setting of the whole run; chosen: those of each phase."""

    shift: str
    shares: Sequence[float]
    best: str
    chosen: Sequence[str]
    speeds: Mapping[str, Sequence[Sequence[float]]]

    def phase_ratios(self, other: str) -> Speeds:
        """Return (seeds, phases): ours / the other's."""
        return np.asarray(np.array(self.speeds[OURS]) / np.array(self.speeds[other]))

    def ratios(self, other: str) -> list[float]:
        """Return (seeds,): ours / the other's, over the whole run."""
        return [float(ratio) for ratio in np.exp(np.log(self.phase_ratios(other)) @ np.array(self.shares))]

    def worst_phase(self, other: str) -> tuple[int, float]:
        """Return the phase, from 1, whose 5% quantile over seeds is lowest, and that quantile."""
        by_phase = [low_quantile(phase.tolist()) for phase in self.phase_ratios(other).T]
        return int(np.argmin(by_phase)) + 1, min(by_phase)


def judge(shift: Shift, seeds: int) -> JudgedShift:
    screened = {
        name: np.log([_replay_load(shift, name, seed) for seed in range(SCREENING_SEEDS)]).mean(0)
        for name in singles(shift.case)
    }
    best = best_on_means({name: [float(phases @ shift.shares())] for name, phases in screened.items()})
    chosen = [
        best_on_means({name: [float(phases[number])] for name, phases in screened.items()})
        for number in range(len(shift.phases))
    ]
    served = {name: [_serve_load(shift, stock(name), seed) for seed in range(seeds)] for name in {PLAIN, best, *chosen}}
    by_phase = [[served[name][seed][number] for number, name in enumerate(chosen)] for seed in range(seeds)]
    measured = {PLAIN: served[PLAIN], BEST: served[best], HINDSIGHT: by_phase}
    if shift.case.world in VARLEN_GRAPHS and pool(shift.case)[0].name != "lookup":
        adaptive = Stock(pool(shift.case)[0].name, LONGEST, adaptive=True)
        measured[ADAPTIVE] = [_serve_load(shift, adaptive, seed) for seed in range(seeds)]
    measured[OURS] = [_serve_load(shift, None, seed) for seed in range(seeds)]
    return JudgedShift(f"{shift.name}, {shift.case}", shift.shares().tolist(), best, chosen, measured)


def _replay_load(shift: Shift, name: str, seed: int) -> Speeds:
    drawn = load(shift, seed)
    return speeds(shift, drawn, run(shift.case, singles(shift.case)[name], drawn, seed))


def _serve_load(shift: Shift, system: Stock | None, seed: int) -> list[float]:
    """Serve the load in vLLM, and return the speed in each phase."""
    drawn, drafters = load(shift, seed), pool(shift.case)
    cell = Cell(shift.case, OURS if system is None else PLAIN, share=1.0, asynchronous=True)
    served = serve(
        cell.setting(), drawn, system, profile(shift.case.world, drafters, seed % PROFILES), asynchronous=True,
        host=host_costs([drafter.name for drafter in drafters], host_system(system)),
    )  # fmt: skip
    return [float(speed) for speed in speeds(shift, drawn, served)]


def table(judged: Sequence[JudgedShift]) -> list[str]:
    """Return lines of Markdown: the 5% quantile over seeds of each ratio, and their geometric means."""
    lines = [f"{len(judged)} loads, {len(judged[0].speeds[OURS])} seeds; 5% quantile over seeds, higher is better.", ""]
    lines += ["| load | plain, worst phase | best static | each phase's best | adaptive verification |"]
    lines += ["|---|---|---|---|---|", *map(_line, judged)]
    means = (_mean(judged, name) for name in (BEST, HINDSIGHT, ADAPTIVE))
    return [*lines, f"| geometric mean over the loads | | {' | '.join(means)} |"]


def _line(judged: JudgedShift) -> str:
    phase, least = judged.worst_phase(PLAIN)
    whole = {name: low_quantile(judged.ratios(name)) for name in judged.speeds if name != OURS}
    plain = f"{least:.3f}{_mark_missed(PLAIN, least)} (phase {phase})"
    best = f"{whole[BEST]:.3f}{_mark_missed(BEST, whole[BEST])} ({judged.best})"
    adaptive = f"{whole[ADAPTIVE]:.3f}" if ADAPTIVE in whole else "cannot run"
    return f"| {judged.shift} | {plain} | {best} | {whole[HINDSIGHT]:.3f} | {adaptive} |"


def _mark_missed(name: str, ratio: float) -> str:
    return "" if ratio >= LEAST[name] else " missed"


def _mean(judged: Sequence[JudgedShift], name: str) -> str:
    ratios = [geometric_mean(result.ratios(name)) for result in judged if name in result.speeds]
    return f"{geometric_mean(ratios):.3f}" if ratios else "-"


def read_results() -> list[JudgedShift]:
    return [JudgedShift(**row) for row in json.loads(RESULTS.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--shifts", type=int, help="only the first so many")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tables", action="store_true", help="measure nothing: print what is there")
    options = parser.parse_args()
    if not options.tables:
        judged: list[JudgedShift] = []
        shifts = changing_loads()[: options.shifts]
        # A process for each load: vLLM's engines leave memory behind.
        with ProcessPoolExecutor(options.processes, get_context("spawn"), max_tasks_per_child=1) as processes:
            for result in processes.map(judge, shifts, [options.seeds] * len(shifts)):
                judged.append(result)
                print(_line(result), flush=True)
                RESULTS.write_text(json.dumps([asdict(row) for row in judged], indent=1) + "\n")
    print("\n".join(table(read_results())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
