"""Host time of an engine step: vLLM's `schedule` and `update_from_output`, stock and with the loop in them.

    python -m bench.host_step [--rounds N]     writes results/host_step.json (about 10 minutes of one core)
    python -m bench.host_step --pool "lookup, head" --requests 64     prints one row, writes nothing

vLLM's own scheduler runs asynchronously on the virtual clock over recorded tokens, under closed loads whose requests
come and go. Three systems take turns within a round: stock vLLM at plain decoding, stock vLLM with the pool's first
model at k = 3, and the loop. A figure is thread CPU time of the mean step, the median over rounds.

    loop_us      schedule_us + update_us of the loop, less those of plain decoding
    stepper_us   the part of it in `loop.stepper` and `loop.request_table`
    core_us      the part of that in the control core
    model_share  of the loop's steps, those in which a model drafted
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from outrider_runtime.control.controller import Controller
from outrider_runtime.loop.request_table import RequestTable
from outrider_runtime.loop.stepper import Stepper
from outrider_runtime.simulate.replay.engine import Setting
from outrider_runtime.simulate.replay.workload import Lengths, draw_closed_load

from bench.host_costs import MEASURED
from bench.replay.settings import TRAITS, Case, case_recording, loop_system, profile, setting
from bench.virtual_clock.engine import Stock, serve

POOLS = {
    "lookup, head": ("lookup", "eagle"),
    "lookup, draft model": ("lookup", "draft"),
    "three models": ("eagle", "draft", "sparse"),
}
REQUESTS = (1, 64, 256)
CASE = Case("llama-3.1-8b-a100", 0.9)
"""Models pay there at every batch that is measured."""
LENGTHS = Lengths(300, 128)
STOCK_K = 3
WARM_STEPS, STEPS = 60, 400
LEAST_STEPS_A_REQUEST = 8  # on average; a load lasts longer than the steps that are measured
SCHEDULE, UPDATE, STEPPER, CORE = "schedule", "update", "stepper", "core"
STEPPER_CALLS = ("verify", "nothing_to_verify", "draft", "on_draft_reports", "on_output", "leaves")
CORE_CALLS = ("plan_verify", "plan_draft", "observe", "release")


class Enough(Exception):  # noqa: N818  # ends a measurement, reports no error
    """Raised after the last measured step."""


class PartTimes:
    """Seconds of thread CPU time by part, and how many steps they were spent in."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps = 0
        self.model_steps = 0
        """Steps in which a model drafted, among those that are measured."""

    def add_timing(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*arguments, **keywords)
            finally:
                self.seconds[part] += time.thread_time() - started

        return run

    def watch(self, core: Any) -> None:
        """Time the scheduler's two calls of every step; the call after the last step raises Enough."""
        scheduler = core.scheduler
        schedule = self.add_timing(SCHEDULE, scheduler.schedule)
        scheduler.schedule = lambda *arguments, **keywords: self._schedule_next(schedule, arguments, keywords)
        scheduler.update_from_output = self.add_timing(UPDATE, scheduler.update_from_output)
        self._count_model_steps(core.model_executor.device)

    @property
    def model_share(self) -> float:
        return self.model_steps / (self.steps - WARM_STEPS)

    def _count_model_steps(self, device: Any) -> None:
        run = device.run

        def run_and_count(*arguments: Any, **keywords: Any) -> Any:
            ran = run(*arguments, **keywords)
            self.model_steps += any(device.drafters[number].passes for number in ran.draft_s)
            return ran

        device.run = run_and_count

    def mean_us(self, *parts: str) -> float:
        return 1e6 * sum(self.seconds[part] for part in parts) / (self.steps - WARM_STEPS)

    def _schedule_next(self, schedule: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        if self.steps == WARM_STEPS:
            self.seconds.clear()
            self.model_steps = 0
        if self.steps == WARM_STEPS + STEPS:
            raise Enough
        self.steps += 1
        return schedule(*arguments, **keywords)


@contextmanager
def _time_loop(times: PartTimes) -> Iterator[None]:
    parts = [(STEPPER, Stepper, STEPPER_CALLS), (STEPPER, RequestTable, ("deliver",)), (CORE, Controller, CORE_CALLS)]
    with ExitStack() as stack:
        for part, owner, names in parts:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, times.add_timing(part, getattr(owner, name))))
        yield


def part_times(replay_setting: Setting, requests: int, stock: Stock | None, model: Any, seed: int) -> PartTimes:
    """Measure the host's time in `STEPS` steps of a closed load. stock: None for the loop, which mounts `model`."""
    rng, times = np.random.default_rng([seed, 31]), PartTimes()
    count = (WARM_STEPS + STEPS) * requests // LEAST_STEPS_A_REQUEST + requests
    load = draw_closed_load(requests, count, case_recording(CASE), None, rng, LENGTHS)
    with _time_loop(times):
        try:
            serve(replay_setting, load, stock, model, asynchronous=True, watch=times.watch)
        except Enough:
            return times
    raise RuntimeError(f"the load of {requests} requests ended before step {WARM_STEPS + STEPS}")


def measure(pool: str, requests: int, rounds: int) -> dict[str, Any]:
    drafters = tuple(TRAITS[name] for name in POOLS[pool])
    replay_setting = replace(setting(CASE, replace(loop_system(), loop=False)), drafters=drafters)
    model = profile(CASE.world, drafters, 0)
    first_model = next(drafter.name for drafter in drafters if drafter.passes)
    stocks = {"plain": Stock(), "speculating": Stock(first_model, STOCK_K), "loop": None}
    rows: dict[str, list[PartTimes]] = {name: [] for name in stocks}
    for number in range(rounds):
        for name, stock in stocks.items():
            rows[name].append(part_times(replay_setting, requests, stock, None if stock else model, number))
    return {"pool": pool, "requests": requests, **_row(rows)}


def _row(rows: dict[str, list[PartTimes]]) -> dict[str, Any]:
    both = (SCHEDULE, UPDATE)
    pairs = zip(rows["loop"], rows["plain"], strict=True)
    added = [loop.mean_us(*both) - plain.mean_us(*both) for loop, plain in pairs]
    calls = {name: {f"{part}_us": _median(times, part) for part in both} for name, times in rows.items()}
    return {
        **calls, "loop_us": round(median(added), 1), "spread_us": [round(min(added), 1), round(max(added), 1)],
        "stepper_us": _median(rows["loop"], STEPPER), "core_us": _median(rows["loop"], CORE),
        "model_share": round(median(times.model_share for times in rows["loop"]), 3),
    }  # fmt: skip


def _median(times: Sequence[PartTimes], part: str) -> float:
    return round(median(part_time.mean_us(part) for part_time in times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", choices=POOLS)
    parser.add_argument("--requests", type=int)
    options = parser.parse_args()
    rows = []
    for pool in [options.pool] if options.pool else POOLS:
        for requests in [options.requests] if options.requests else REQUESTS:
            rows.append(measure(pool, requests, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
    if options.pool is None and options.requests is None:
        document = {"steps": STEPS, "rounds": options.rounds, "world": str(CASE), "rows": rows}
        MEASURED.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
