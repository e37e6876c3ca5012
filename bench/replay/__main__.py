"""python -m bench.replay             the bars, at most 20 minutes of two quiet cores
python -m bench.replay --quick     a few seeds and points, to see that it runs
python -m bench.replay --judge     the verdicts of the stored results
python -m bench.replay --tables    the tables of docs/results/replay.md, from the stored results
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.replay import plan, pool, profiles, slo_mix, static_load, wrong_models
from bench.replay.bars import Bar, summary
from bench.replay.cells import COUNT
from bench.replay.tables import tables

RESULTS = Path(__file__).parents[1] / "results" / "replay.json"
PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Job:
    """Work of one process."""

    part: str
    name: str
    work: Callable[..., object]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Done:
    job: Job
    output: object
    cells: int
    cpu_s: float


def main() -> int:
    options = _options()
    if options.tables:
        print(tables(json.loads(options.output.read_text())))
        return 0
    if not options.judge:
        replayed = measure(plan.QUICK if options.quick else plan.DEFAULT, options.minutes, options.only)
        options.output.write_text(json.dumps(replayed, indent=1) + "\n")
    _print(json.loads(options.output.read_text()))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="what is not begun by then is left out (default 20)"
    )
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS, help="some parts")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def _print(document: dict[str, Any]) -> None:
    """Print the verdict of each bar, and a summary."""
    bars = [Bar(**bar) for bar in document["bars"]]
    for bar in sorted(bars, key=lambda verdict: (verdict.name, verdict.holds, verdict.where)):
        print(bar.line())
    print("\n".join(summary(bars)))
    print(f"{document['cells']} cells, {document['cpuSeconds']} CPU seconds, {document['seeds']} seeds")
    if document["leftOut"]:
        print(f"left out for lack of time: {'; '.join(document['leftOut'])}")


def measure(size: plan.Size, minutes: float, parts: Sequence[str]) -> dict[str, Any]:
    """Run the jobs that fit into the time, in the plan's order; the result names those left out."""
    until = time.monotonic() + 60 * minutes
    done: list[Done] = []
    waiting, left_out = [job for job in jobs(size) if job.part in parts], list[str]()
    with ProcessPoolExecutor(PROCESSES) as executor:
        running: set[Future[Done]] = set()
        while waiting or running:
            while waiting and len(running) < PROCESSES:
                job = waiting.pop(0)
                if time.monotonic() > until:
                    left_out.append(job.name)
                else:
                    running.add(executor.submit(run_job, job))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done.append(future.result())
                print(
                    f"{done[-1].job.name}: {done[-1].cells} cells, {done[-1].cpu_s:.0f} s", file=sys.stderr, flush=True
                )
    seeds = {"seeds": size.seeds, "fewer": size.fewer, "screening": size.screening}
    return document(done) | {"leftOut": left_out, "profiles": profiles.documents(size.worlds)} | seeds


def run_job(job: Job) -> Done:
    cells, began_s = COUNT.cells, time.process_time()
    job_output = job.work(*job.arguments)
    return Done(job, job_output, COUNT.cells - cells, time.process_time() - began_s)


PARTS = ("static", "slo", "wrong", "pool", "block")


def jobs(size: plan.Size) -> Iterator[Job]:
    for point in plan.points(size):
        yield Job("static", f"static: {point}", static_load.judge, (point, size.seeds, size.screening))
    for mix in plan.mixes(size):
        yield Job("slo", f"SLO mix: {mix.case}", slo_mix.judge, (mix, size.fewer, size.screening))
    for point in plan.wrong_points(size):
        yield Job("wrong", f"wrong models: {point}", wrong_models.judge, (point, size.fewer))
    for case, requests in plan.pools():
        yield Job(
            "pool", f"pool: {case}, {requests} requests", pool.judge, (case, requests, size.fewer, size.screening)
        )
    for case, requests in plan.block_pools():
        name = f"block head: {case}, {requests} requests"
        yield Job("block", name, pool.judge, (case, requests, size.fewer, size.screening))


def document(done: Sequence[Done]) -> dict[str, Any]:
    by_part = {part: [job_result.output for job_result in done if job_result.job.part == part] for part in PARTS}
    return {"bars": [asdict(bar) for bar in _bars(by_part)], **_figures(by_part)} | {
        "cells": sum(job_result.cells for job_result in done),
        "cpuSeconds": round(sum(job_result.cpu_s for job_result in done)),
    }


def _bars(by_part: dict[str, list[Any]]) -> list[Bar]:
    bar_groups = [
        *(slo_mix.bars(judged) for judged in by_part["slo"]),
        *by_part["wrong"],
        *(pool.bars(judged) for judged in by_part["pool"]),
    ]
    blocks = pool.block_bars(by_part["block"]) if by_part["block"] else []
    return static_load.bars(by_part["static"]) + [bar for bars in bar_groups for bar in bars] + blocks


def _figures(by_part: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        "static": [
            {
                "world": judged.point.case.world, "acceptance": judged.point.case.acceptance,
                "group": judged.point.case.group,
                "requests": judged.point.requests, "best": judged.best, "goodput": round_figures(judged.figures),
            }
            for judged in by_part["static"]
        ],
        "slo": [slo_mix.document(judged) for judged in by_part["slo"]],
        "pool": [
            {"case": str(judged.case), "requests": judged.requests, "goodput": round_figures(judged.figures)}
            for judged in (*by_part["pool"], *by_part["block"])
        ],
    }  # fmt: skip


def round_figures(figures: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(value, 1) for value in values] for name, values in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
