"""python -m tests.benchmarks.replay             the bars, at most 20 minutes
python -m tests.benchmarks.replay --quick     a few seeds and points, to see that it runs
python -m tests.benchmarks.replay --judge     nothing anew: the verdicts of what is there
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from tests.benchmarks.replay import phases, plan, slo_mix, static_load
from tests.benchmarks.replay.bars import Bar
from tests.benchmarks.replay.plots import static_plot
from tests.benchmarks.replay.settings import Case, ours

RESULTS = Path(__file__).parent.parent / "results" / "replay.json"
PROCESSES = 2
Work = Callable[[], dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="what is not begun by then is left out (default 20)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.judge:
        found = measured(plan.QUICK if options.quick else plan.DEFAULT, options.minutes)
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        static_plot(found, options.output.with_suffix(".png"))
    bars = [Bar(**bar) for bar in json.loads(options.output.read_text())["bars"]]
    for bar in sorted(bars, key=lambda one: (one.name, one.holds, one.where)):
        print(bar.line())
    missed = sum(not bar.holds for bar in bars)
    print(f"{len(bars) - missed} of {len(bars)} bars hold")
    return 0


def measured(size: plan.Size, minutes: float) -> dict[str, Any]:
    """Runs what fits into the time, in the plan's order; says what did not."""
    until = time.monotonic() + 60 * minutes
    parts: list[dict[str, Any]] = []
    left_out: list[str] = []
    with ProcessPoolExecutor(PROCESSES) as pool:
        waiting = list(jobs(size))
        running: dict[Any, str] = {}
        while waiting or running:
            while waiting and len(running) < PROCESSES:
                name, work, arguments = waiting.pop(0)
                if time.monotonic() > until:
                    left_out.append(name)
                else:
                    running[pool.submit(work, *arguments)] = name
            if not running:
                break
            for future in wait(running, return_when="FIRST_COMPLETED").done:
                parts.append(future.result())
                print(f"{running.pop(future)}", file=sys.stderr, flush=True)
    return _joined(parts) | {"leftOut": left_out, "seeds": size.seeds, "screening": size.screening}


def jobs(size: plan.Size) -> Iterator[tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]]:
    for point in plan.points(size):
        yield f"static: {point}", static, (point, size)
    for shift in plan.shifts():
        yield f"shift: {shift.name}, {shift.case}", shifting, (shift, min(size.seeds, 5))
    for name in ("llama-3.1-8b-h200", "llama-3.1-8b-a100"):
        yield f"SLO mix: {name}", slo, (name, min(size.seeds, 3))
    for point in plan.wrong_points(size):
        yield f"wrong models: {point}", wrong, (point, size)


def static(point: static_load.Point, size: plan.Size) -> dict[str, Any]:
    judged = static_load.judge(point, size.seeds, size.screening)
    return {"static": [judged]}


def shifting(shift: phases.Shift, seeds: int) -> dict[str, Any]:
    return {"shifts": [phases.judge(shift, seeds)]}


def slo(name: str, seeds: int) -> dict[str, Any]:
    bars, means = slo_mix.judge(Case(name, 0.7), plan.plain_step_s(name), plan.rates(name), seeds)
    return {"slo": [{"world": name, "rates": plan.rates(name), "attained": means}], "bars": bars}


def wrong(point: static_load.Point, size: plan.Size) -> dict[str, Any]:
    seeds = min(size.seeds, 5)
    own = static_load.measure(point, ours(), seeds)
    judged = static_load.Judged(point, {"ours": own}, "ours")
    return {"bars": static_load.wrong_models([judged])}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    judged = [one for part in parts for one in part.get("static", [])]
    shifted = [one for part in parts for one in part.get("shifts", [])]
    bars = [bar for part in parts for bar in part.get("bars", [])]
    bars += static_load.bars(judged) + phases.bars(shifted)
    return {
        "bars": [{name: getattr(bar, name) for name in Bar.__dataclass_fields__} for bar in bars],
        "static": [
            {
                "world": one.point.case.world, "acceptance": one.point.case.acceptance, "group": one.point.case.group,
                "requests": one.point.requests, "best": one.best,
                "goodput": {name: [round(value, 2) for value in found] for name, found in one.figures.items()},
            }
            for one in judged
        ],
        "shifts": [
            {"name": one.shift.name, "case": str(one.shift.case), "ours": one.ours, "oracle": one.oracle,
             "singles": one.singles}
            for one in shifted
        ],
        "slo": [one for part in parts for one in part.get("slo", [])],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
