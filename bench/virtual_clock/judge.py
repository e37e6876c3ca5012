"""The judge of figures about GPUs: vLLM's own scheduler on the virtual clock, asynchronous as on GPUs.

    python -m bench.virtual_clock.judge     [--seeds N] [--points N] [--resume]; --points 6 takes ten minutes of a core
    python -m bench.virtual_clock.judge --ours     measures the loop alone again: the clock is virtual, so the recorded
                                                   latencies of the other systems are what they would be now
    python -m bench.virtual_clock.judge --tables     measures nothing: prints the Markdown of docs/results.md

Closed loads of 1 to 256 requests, in pools with a lookup, without one, and of a lookup alone. Each point compares the
loop with plain decoding, with the best static setting, and with vLLM's adaptive verification where that can run. The
replay finds the best static setting over a few seeds; here it is served again. Each system is charged the host's time
of its scheduler (`bench.host_step`, `engine.charge`). On worlds whose attention takes any lengths the device
chooses what is verified (`vllm_plugin.device_ranking`). A ratio is the other's mean request latency / ours, after each
client's first request: above 1 ours is faster. Writes results/judge.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from outrider_runtime.simulate.replay.engine import ReplayEngine
from outrider_runtime.simulate.replay.workload import Workload, draw_closed_load

from bench.host_costs import LOOP, SPECULATING, host_costs
from bench.host_costs import PLAIN as WITHOUT_DRAFTS
from bench.replay.bars import geometric_mean, low_quantile
from bench.replay.settings import LONGEST, PROFILES, VARLEN_GRAPHS, Case, case_recording, pool, profile, singles
from bench.virtual_clock.cells import LENGTHS, Cell
from bench.virtual_clock.engine import Stock, serve

RESULTS = Path(__file__).parents[1] / "results" / "judge.json"
SCREENING_SEEDS = 2
LEAST_REQUESTS = 32
POINTS_OF_A_PROCESS = 3  # vLLM's engines leave memory behind: a process had 10 GiB after six points
AHEAD = 2  # points: their settings are screened while one is served, so that no process waits
ADAPTIVE = "adaptive verification"
PLAIN, BEST, OURS = "plain", "best static", "ours"
LEAST = {PLAIN: (0.99, 1.00), BEST: (0.98, 1.00), ADAPTIVE: (1.00, 1.10)}
"""Least 5% quantile over seeds at every point, and least geometric mean over the points. Plain decoding may be ahead by
what probes and exploration cost: 1%."""
H200, A100, L40S = "llama-3.1-8b-h200", "llama-3.1-8b-a100", "llama-3.1-8b-l40s"
H100_70B, CPU = "llama-3.1-70b-4xh100", "smollm2-135m-cpu"
EAGLE_LOOKUP, DRAFT_LOOKUP, EAGLE, DRAFT, LOOKUP = (
    ("eagle", "lookup"), ("draft", "lookup"), ("eagle",), ("draft",), ("lookup",)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JudgePoint:
    world: str
    acceptance: float | None
    drafters: tuple[str, ...]
    clients: int

    @property
    def case(self) -> Case:
        return Case(self.world, self.acceptance, drafters=self.drafters)

    @property
    def asynchronous(self) -> bool:
        return self.world != CPU

    @property
    def has_adaptive(self) -> bool:
        return self.world in VARLEN_GRAPHS and self.drafters[0] != "lookup"

    def __str__(self) -> str:
        lift = "recorded" if self.acceptance is None else f"{self.acceptance}"
        return f"{self.world}, {lift}, {' + '.join(self.drafters)}, {self.clients} requests"

    def load(self, seed: int) -> Workload:
        """Draw three requests per client, six where few run; the first one of each client is not counted."""
        count = max(LEAST_REQUESTS, min(6 * self.clients, 192), 3 * self.clients)
        rng = np.random.default_rng([seed, 29])
        return draw_closed_load(self.clients, count, case_recording(self.case), None, rng, LENGTHS)

    def cell(self, system: str) -> Cell:
        return Cell(self.case, system, clients=self.clients, asynchronous=self.asynchronous)


POINTS = (
    JudgePoint(H200, 0.5, EAGLE_LOOKUP, 128),
    JudgePoint(A100, 0.5, DRAFT_LOOKUP, 64),
    JudgePoint(H100_70B, 0.5, EAGLE_LOOKUP, 128),
    JudgePoint(L40S, 0.5, EAGLE_LOOKUP, 32),
    JudgePoint(H200, 0.7, EAGLE_LOOKUP, 1),
    JudgePoint(H200, None, LOOKUP, 128),
    JudgePoint(CPU, 0.7, EAGLE_LOOKUP, 8),
    JudgePoint(H200, 0.7, EAGLE, 32),
    JudgePoint(A100, None, LOOKUP, 64),
    JudgePoint(H200, None, EAGLE_LOOKUP, 32),
    JudgePoint(H100_70B, 0.7, EAGLE, 8),
    JudgePoint(L40S, 0.7, EAGLE_LOOKUP, 128),
    JudgePoint(H100_70B, None, LOOKUP, 128),
    JudgePoint(A100, 0.9, DRAFT, 8),
    JudgePoint(H200, 0.5, EAGLE, 256),
    JudgePoint(CPU, None, LOOKUP, 24),
    JudgePoint(H200, 0.9, EAGLE_LOOKUP, 256),
    JudgePoint(L40S, None, LOOKUP, 1),
    JudgePoint(H100_70B, 0.9, EAGLE_LOOKUP, 1),
    JudgePoint(A100, 0.7, DRAFT_LOOKUP, 1),
    JudgePoint(CPU, 0.7, EAGLE, 1),
)
"""The most important come first: --points takes the first so many."""


@dataclass(frozen=True, slots=True)
class JudgedPoint:
    point: str
    best: str
    """The best static setting."""
    latency_s: Mapping[str, Sequence[float]]
    """Mean latencies of each system, by seed."""

    def ratios(self, other: str) -> list[float]:
        return [theirs / ours for theirs, ours in zip(self.latency_s[other], self.latency_s[OURS], strict=True)]


def judge_in_batches(points: Sequence[JudgePoint], seeds: int, processes: int) -> Iterator[JudgedPoint]:
    """Judge the points in order, each batch of them in new processes, so that memory is given back."""
    for start in range(0, len(points), POINTS_OF_A_PROCESS):
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as executor:
            yield from judge_points(points[start : start + POINTS_OF_A_PROCESS], seeds, executor)


def judge_points(points: Sequence[JudgePoint], seeds: int, processes: Executor) -> Iterator[JudgedPoint]:
    """Judge the points in order. While one is served, the static settings of the next ones are screened."""
    screenings, running = deque(_screen(point, processes) for point in points[:AHEAD]), deque[_Running]()
    for number, point in enumerate(points):
        best = _best_setting(screenings.popleft())
        running.append(_serve(point, best, seeds, processes))
        if number + AHEAD < len(points):
            screenings.append(_screen(points[number + AHEAD], processes))
        if len(running) > AHEAD:
            yield running.popleft().collect()
    while running:
        yield running.popleft().collect()


def judge_again(recorded: Sequence[JudgedPoint], processes: int) -> Iterator[JudgedPoint]:
    """Judge recorded points with the loop as it is now, and every other system as it was recorded."""
    points = {str(point): point for point in POINTS}
    for start in range(0, len(recorded), POINTS_OF_A_PROCESS):
        batch = recorded[start : start + POINTS_OF_A_PROCESS]
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as executor:
            ours = [
                [executor.submit(latency, points[old.point], None, seed) for seed in range(len(old.latency_s[OURS]))]
                for old in batch
            ]
            for old, futures in zip(batch, ours, strict=True):
                latency_s = {**old.latency_s, OURS: [future.result() for future in futures]}
                yield JudgedPoint(old.point, old.best, latency_s)


@dataclass(frozen=True, slots=True)
class _Running:
    point: JudgePoint
    best: str
    latency_s: Mapping[str, Sequence[Future[float]]]

    def collect(self) -> JudgedPoint:
        latency_s = {name: [future.result() for future in futures] for name, futures in self.latency_s.items()}
        return JudgedPoint(str(self.point), self.best, latency_s)


def _screen(point: JudgePoint, processes: Executor) -> dict[str, list[Future[float]]]:
    """Submit the replays of each static setting, plain decoding included: setting -> mean latency by seed."""
    return {
        name: [processes.submit(_replayed_s, point, name, seed) for seed in range(SCREENING_SEEDS)]
        for name in singles(point.case)
    }


def _best_setting(screening: Mapping[str, Sequence[Future[float]]]) -> str:
    return min(screening, key=lambda name: float(np.mean([future.result() for future in screening[name]])))


def _serve(point: JudgePoint, best: str, seeds: int, processes: Executor) -> _Running:
    systems = {PLAIN: Stock(), BEST: stock(best), OURS: None}
    if point.has_adaptive:
        systems[ADAPTIVE] = Stock(point.drafters[0], LONGEST, adaptive=True)
    latency_s = {
        name: [processes.submit(latency, point, system, seed) for seed in range(seeds)]
        for name, system in systems.items()
    }
    return _Running(point, best, latency_s)


def stock(name: str) -> Stock:
    drafter, _, length = name.partition(", k = ")
    return Stock(drafter, int(length)) if length else Stock()


def _replayed_s(point: JudgePoint, name: str, seed: int) -> float:
    cell = point.cell(name)
    engine = ReplayEngine(cell.setting(), point.load(seed), cell.policy().build(cell.case, seed))
    engine.run()
    latency_s = engine.requests.done_s - engine.requests.arrived_s
    return float(latency_s[point.clients :].mean())


def latency(point: JudgePoint, system: Stock | None, seed: int) -> float:
    """Measure the mean request latency in vLLM, in seconds, after each client's first request; the host is charged."""
    cell = point.cell(OURS if system is None else PLAIN)
    model = profile(point.world, pool(point.case), seed % PROFILES)
    return serve(
        cell.setting(), point.load(seed), system, model, asynchronous=point.asynchronous,
        host=host_costs(point.drafters, host_system(system)),
    ).steady_latency_s  # fmt: skip


def host_system(system: Stock | None) -> str:
    if system is None:
        return LOOP
    return SPECULATING if system.drafter else WITHOUT_DRAFTS


def table(judged: Sequence[JudgedPoint]) -> list[str]:
    """Return lines of Markdown: the 5% quantile over seeds of each ratio, and a summary."""
    seeds = len(judged[0].latency_s[OURS]) if judged else 0
    lines = [f"{len(judged)} of {len(POINTS)} points, {seeds} seeds; 5% quantile over seeds, higher is better.", ""]
    lines += ["| point | plain / ours | best static / ours | adaptive verification / ours |", "|---|---|---|---|"]
    lines += [_line(judged_point) for judged_point in judged]
    lines += [f"| geometric mean | {' | '.join(_mean(judged, name) for name in LEAST)} |", ""]
    return lines + [_summary(judged, name) for name in LEAST]


def _line(judged: JudgedPoint) -> str:
    columns = [f"{_figure(judged, name)} ({judged.best})" if name == BEST else _figure(judged, name) for name in LEAST]
    return f"| {judged.point} | {' | '.join(columns)} |"


def _summary(judged: Sequence[JudgedPoint], name: str) -> str:
    ratios = {point.point: low_quantile(point.ratios(name)) for point in judged if name in point.latency_s}
    if not ratios:
        return f"- {name}: runs at no point."
    worst, least = min(ratios, key=lambda point: ratios[point]), LEAST[name][0]
    holds = sum(ratio >= least for ratio in ratios.values())
    at_least = f"at least {least:.2f} at {holds} of {len(ratios)} points"
    return f"- {name} / ours: {at_least}; lowest {ratios[worst]:.3f} ({worst})."


def _figure(judged: JudgedPoint, name: str) -> str:
    if name not in judged.latency_s:
        return "cannot run"
    quantile = low_quantile(judged.ratios(name))
    return f"{quantile:.3f}{'' if quantile >= LEAST[name][0] else ' missed'}"


def _mean(judged: Sequence[JudgedPoint], name: str) -> str:
    ratios = [geometric_mean(judged_point.ratios(name)) for judged_point in judged if name in judged_point.latency_s]
    if not ratios:
        return "-"
    return f"{geometric_mean(ratios):.3f}{'' if geometric_mean(ratios) >= LEAST[name][1] else ' missed'}"


def _write(judged: Sequence[JudgedPoint], seeds: int) -> None:
    rows = [
        {"point": judged_point.point, "best": judged_point.best, "latencyS": dict(judged_point.latency_s)}
        for judged_point in judged
    ]
    RESULTS.write_text(json.dumps({"seeds": seeds, "points": rows}, indent=1) + "\n")


def read_results() -> list[JudgedPoint]:
    return [
        JudgedPoint(row["point"], row["best"], row["latencyS"]) for row in json.loads(RESULTS.read_text())["points"]
    ]


def _are_first_points(judged: Sequence[JudgedPoint], seeds: int) -> bool:
    """Whether `judged` are the first points, each with so many seeds."""
    names = [judged_point.point for judged_point in judged]
    has_seeds = all(len(judged_point.latency_s[OURS]) == seeds for judged_point in judged)
    return has_seeds and names == [str(point) for point in POINTS[: len(judged)]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--points", type=int, default=len(POINTS), help="only the first so many")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on after the points in results/judge.json")
    parser.add_argument("--ours", action="store_true", help="measure the loop at the points in results/judge.json")
    parser.add_argument("--tables", action="store_true", help="measure nothing: print what is there")
    options = parser.parse_args()
    reads = options.tables or options.resume or options.ours
    if reads and not RESULTS.exists():
        parser.error(f"there is no {RESULTS}: run the judge without --tables, --resume and --ours first")
    judged_points = read_results() if reads else []
    if options.resume and not _are_first_points(judged_points, options.seeds):
        parser.error(f"{RESULTS} holds other points or seeds: run the judge without --resume")
    if options.ours:
        recorded, judged_points = judged_points, []
        for judged_point in judge_again(recorded, options.processes):
            judged_points.append(judged_point)
            print(_line(judged_point), flush=True)
        _write(judged_points, len(judged_points[0].latency_s[OURS]))
    elif not options.tables:
        points = POINTS[len(judged_points) : options.points]
        for judged_point in judge_in_batches(points, options.seeds, options.processes):
            judged_points.append(judged_point)
            print(_line(judged_point), flush=True)
            _write(judged_points, options.seeds)
    print("\n".join(table(judged_points)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
