"""What each mechanism of the control core buys: replays with one of them off at a time.

    python -m bench.ablation [--minutes 20]     writes results/ablation.json; no load starts after 20 minutes
    python -m bench.ablation --only probes      measures some mechanisms, and keeps the others' results

Both sides of a ratio have the same loads, seeds, profiles and worlds. A load is measured by goodput, one that shifts
by the replay's speeds, one with SLO classes by the share of requests that met theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.draft_options import EVERY_GAP
from outrider_runtime.control.observed_times import COMMON_VARIANCE, TERMS
from outrider_runtime.control.propose import nothing_fed
from outrider_runtime.simulate.replay.engine import Policy

from bench.replay import phases, plan, pool, slo_mix, static_load, wrong_models
from bench.replay.bars import geometric_mean
from bench.replay.cells import run
from bench.replay.settings import Case, System, loop_system
from bench.replay.static_load import Point

RESULT = Path(__file__).parent / "results" / "ablation.json"
SEEDS = 1
SLO_MIX = "SLO mix"
H200, A100, L40S, CPU = "llama-3.1-8b-h200", "llama-3.1-8b-a100", "llama-3.1-8b-l40s", "smollm2-135m-cpu"


# -- what is switched off ---------------------------------------------------------------------------------------------


def undo_after_each_step(controller: Controller, undo: Callable[[], None]) -> None:
    """Call `undo` after each step, so that nothing is learned from it."""
    observe = controller.observe

    def observe_and_undo(outcome: Any) -> None:
        observe(outcome)
        undo()

    controller.observe = observe_and_undo  # type: ignore[method-assign]


def stop_correcting_target(controller: Controller) -> None:
    beliefs = controller._evidence.latency.beliefs
    undo_after_each_step(controller, partial(_uncorrect, beliefs.target))


def stop_correcting_drafts(controller: Controller) -> None:
    beliefs = controller._evidence.latency.beliefs
    undo_after_each_step(controller, partial(_uncorrect, beliefs.drafts))


def _uncorrect(belief: Any) -> None:
    belief.deviation[:], belief.covariance[:], belief.costs[:] = 0.0, belief.prior, belief.profiled


def ignore_request_factors(controller: Controller) -> None:
    """Estimate acceptance without a factor for each request."""
    undo_after_each_step(controller, lambda: controller._evidence.acceptance._known.requests.fill(0.0))


def share_deviations(controller: Controller) -> None:
    """Let all terms and rows of a cost deviate from their profile by one factor."""
    for belief in controller._evidence.latency.memory[:2]:
        prior, covariance = belief[1], belief[3]
        prior[..., :TERMS, :TERMS] = COMMON_VARIANCE
        prior[..., TERMS:, TERMS:] = 0.0
        covariance[:] = prior


def stop_lowering_lambda(controller: Controller) -> None:
    """Search at the lambda of measured goodput, even if no choice reaches it."""
    search = controller._propose._search

    def best_at_same_lambda(batch: Any, closed: Any = EVERY_GAP, lambda_over_plain: float | None = None) -> Any:
        return search._at(lambda_over_plain or controller._evidence.goodput.ratio, batch, closed)

    search.best = best_at_same_lambda  # type: ignore[method-assign]


def never_switch_off(controller: Controller) -> None:
    """Let speculation go on after probes found that it loses."""
    trials = controller._evidence.trials
    trials._judge = lambda: trials.speedup.verdict(for_slo=False)  # type: ignore[assignment, method-assign]


def stop_ageing(controller: Controller) -> None:
    controller._evidence.acceptance.age = lambda _time: None  # type: ignore[assignment, method-assign]


def use_modelled_goodput(controller: Controller) -> None:
    """Take the modelled goodput of plain decoding as lambda."""
    undo_after_each_step(controller, controller._evidence.goodput.__init__)  # type: ignore[misc]


def stop_probes(controller: Controller) -> None:
    controller._evidence.trials.probes = lambda *_, **__: False  # type: ignore[method-assign]


def stop_exploration(controller: Controller) -> None:
    controller._evidence.trials.may_explore = lambda **_: False  # type: ignore[method-assign]


def never_disable(controller: Controller) -> None:
    """Keep up the caches of drafters that are not chosen."""
    controller._propose._kv.note_use = lambda _choice: None  # type: ignore[assignment, method-assign]


def leave_gaps(controller: Controller) -> None:
    """Leave a draft model's KV gaps open."""
    search = controller._propose._search
    controller._propose._kv.choose = lambda batch: (search.best(batch, nothing_fed(batch)), nothing_fed(batch))  # type: ignore[method-assign]


def drop_second_rank(controller: Controller) -> None:
    """Give a request no model where its lookup finds nothing."""
    planned = controller.plan_draft

    def plan_draft(batch: Any) -> Any:
        made = planned(batch)
        return replace(made, drafter_order=made.drafter_order[:1])

    controller.plan_draft = plan_draft  # type: ignore[method-assign]


SWITCHES: Mapping[str, Callable[[Controller], None]] = {
    "correction of target": stop_correcting_target,
    "correction of drafts": stop_correcting_drafts,
    "own deviations": share_deviations,
    "factors": ignore_request_factors,
    "ageing": stop_ageing,
    "measured goodput": use_modelled_goodput,
    "lowered lambda": stop_lowering_lambda,
    "probes": stop_probes,
    "switching off": never_switch_off,
    "exploration": stop_exploration,
    "disabling": never_disable,
    "filling gaps": leave_gaps,
    "second rank": drop_second_rank,
}
"""Mechanism -> what takes it out of a controller."""


def switch_off(system: System, switch: Callable[[Controller], None] | None) -> System:
    def build(case: Case, seed: int) -> Policy:
        controller = system.build(case, seed)
        assert isinstance(controller, Controller)
        if switch is not None:
            switch(controller)
        return controller

    return replace(system, build=build)


# -- what it is measured on -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    system: System
    measure: Callable[[System, int], float]
    """System, seed -> a figure (higher is better)."""


def cells() -> Iterable[Cell]:
    for name, acceptance, requests in (
        (H200, 0.7, 1),
        (H200, 0.5, 128),
        (A100, 0.7, 8),
        (A100, 0.7, 32),
        (L40S, 0.5, 32),
        (CPU, None, 8),
    ):
        yield static(name, acceptance, requests, loop_system())
    for title, distort in (("knee off", wrong_models.move_knee), ("expensive drafts", wrong_models.understate_drafts)):
        yield static(A100, 0.7, 32, loop_system(distort=distort), f", {title}")
    point = Point(Case(A100, 0.7), 32)
    yield Cell(f"{point}, not all of a step reported", loop_system(), partial(_measure_unreported, point))
    for shift in (plan.rise(Case(H200, 0.7)), plan.prompt_groups(Case(H200)), plan.prompt_groups(Case(A100))):
        yield Cell(f"{shift.name}, {shift.case}", loop_system(), partial(_measure_shift, shift))
    for mixed, name in plan.MIXED:
        case = Case(name, mix=mixed)
        yield Cell(f"{case}, 8 requests", loop_system(), partial(_measure_pool, case))
    for mix in plan.mixes(plan.DEFAULT)[:1]:
        yield Cell(f"{SLO_MIX}, {mix.case}", loop_system(classes=mix.targets), partial(_measure_attainment, mix))


def static(name: str, acceptance: float | None, requests: int, system: System, title: str = "") -> Cell:
    point = Point(Case(name, acceptance), requests)
    return Cell(f"{point}{title}", system, lambda variant, seed: static_load.measure(point, variant, [seed])[0])


def _measure_unreported(point: Point, system: System, seed: int) -> float:
    return static_load.measure(point, wrong_models.hide_times(system), [seed])[0]


def _measure_shift(shift: phases.Shift, system: System, seed: int) -> float:
    load = phases.load(shift, seed)
    speed = phases.speeds(shift, load, run(shift.case, system, load, seed))
    return float(np.exp(np.log(speed) @ shift.shares()))


def _measure_pool(case: Case, system: System, seed: int) -> float:
    return run(case, system, pool.load(case, 8, seed), seed).goodput


def _measure_attainment(mix: slo_mix.Mix, system: System, seed: int) -> float:
    return mix.measure(system, mix.coarse[4], [seed])[0].share


# -- what comes of it -------------------------------------------------------------------------------------------------


@cache
def all_cells() -> tuple[Cell, ...]:
    return tuple(cells())


def figure(cell: int, switch: str | None, seed: int) -> float:
    """Measure goodput, speed or attainment of one load. switch: what is off; None: the whole loop."""
    measured_cell = all_cells()[cell]
    system = switch_off(measured_cell.system, None if switch is None else SWITCHES[switch])
    return measured_cell.measure(system, seed)


def measure_ratios(
    switches: Sequence[str], seeds: int, minutes: float, processes: Executor
) -> dict[str, dict[str, float]]:
    """Return switch -> load -> figure with it off / figure of the whole loop, geometric mean over the seeds.

    No load starts after `minutes`.
    """
    ratios: dict[str, dict[str, float]] = {name: {} for name in switches}
    ends_at = time.monotonic() + 60 * minutes
    for number, cell in enumerate(all_cells()):
        if time.monotonic() > ends_at:
            break
        whole = [processes.submit(figure, number, None, seed) for seed in range(seeds)]
        off = {name: [processes.submit(figure, number, name, seed) for seed in range(seeds)] for name in switches}
        for name, futures in off.items():
            pairs = zip(futures, whole, strict=True)
            ratios[name][cell.name] = round(
                geometric_mean([cell_result.result() / all_.result() for cell_result, all_ in pairs]), 4
            )
        print(cell.name, {name: row[cell.name] for name, row in ratios.items()}, file=sys.stderr, flush=True)
    return ratios


def table(ratios: Mapping[str, Mapping[str, float]]) -> str:
    """Return the Markdown of docs/explanation/control-loop.md. The load with SLO classes is left out: with one seed its
    attainment varies by a quarter whatever is off."""
    rows = {name: _drop_slo_mix(row) for name, row in ratios.items()}
    loads = len(next(iter(rows.values())))
    lines = [f"{loads} of {len(all_cells())} loads.", "", "| off | off / whole, geometric mean | lowest | highest |"]
    lines.append("|---|---|---|---|")
    for name, row in sorted(rows.items(), key=lambda entry: geometric_mean(list(entry[1].values()))):
        least, most = min(row, key=lambda cell: row[cell]), max(row, key=lambda cell: row[cell])
        mean = geometric_mean(list(row.values()))
        lines.append(f"| {name} | {mean:.3f} | {row[least]:.3f} ({least}) | {row[most]:.3f} ({most}) |")
    return "\n".join(lines)


def _drop_slo_mix(row: Mapping[str, float]) -> dict[str, float]:
    return {cell: ratio for cell, ratio in row.items() if not cell.startswith(SLO_MIX)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SWITCHES, default=list(SWITCHES), help="some mechanisms")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, default=20.0, help="no load starts after so many")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tables", action="store_true", help="measure nothing: print the table of what is there")
    options = parser.parse_args()
    if not options.tables:
        with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as processes:
            ratios = measure_ratios(options.only, options.seeds, options.minutes, processes)
        kept = {name: row for name, row in json.loads(RESULT.read_text())["ratios"].items() if name in SWITCHES}
        RESULT.write_text(json.dumps({"seeds": options.seeds, "ratios": kept | ratios}, indent=1) + "\n")
    print(table(json.loads(RESULT.read_text())["ratios"]))


if __name__ == "__main__":
    main()
