"""Bar 1: at a static load, close to each point's best static setting; bar 6: against vLLM's adaptive verification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_closed_load

from bench.replay.bars import Bar, best_on_means, geometric_mean, low_quantile, pair_ratios
from bench.replay.cells import run
from bench.replay.settings import Case, System, baselines, case_recording, loop_system, singles

LEAST_POINT, LEAST_MEAN, LEAST_OF_PLAIN = 0.98, 1.00, 0.98
LEAST_OF_ADAPTIVE, LEAST_ADAPTIVE_MEAN, LEAST_WHERE_NOTHING_PAYS = 0.98, 1.00, 1.05
ADAPTIVE = "adaptive verification"
ROUNDS = 7
LONG_CONTEXT = Lengths(8000, 128)


@dataclass(frozen=True, slots=True)
class Point:
    case: Case
    requests: int

    def __str__(self) -> str:
        return f"{self.case}, {self.requests} requests"


def load(point: Point, seed: int) -> Workload:
    """Draw ROUNDS requests per client, so that the transient at the start is a small part."""
    rng = np.random.default_rng([seed, point.requests])
    lengths = LONG_CONTEXT if point.case.world.endswith("long") else Lengths(300, 160)
    count = point.requests * ROUNDS + 8
    return draw_closed_load(point.requests, count, case_recording(point.case), point.case.group, rng, lengths)


def measure(point: Point, system: System, seeds: Iterable[int]) -> list[float]:
    return [run(point.case, system, load(point, seed), seed).goodput for seed in seeds]


@dataclass(frozen=True, slots=True)
class Judged:
    """Goodput over seeds, by system."""

    point: Point
    figures: dict[str, list[float]]
    best: str
    """The best of the static settings, plain decoding included."""

    def ratios(self, to: str, mine: str = "ours") -> list[float]:
        return pair_ratios(self.figures[mine], self.figures[to])


def judge(point: Point, seeds: int, screening: int) -> Judged:
    """Screen all baselines with a few seeds; measure ours, the best static one, plain and the adaptive one with all."""
    systems = baselines(point.case)
    figures = {name: measure(point, system, range(screening)) for name, system in systems.items()}
    best = best_on_means({name: figures[name] for name in singles(point.case)})
    for name in {best, "plain", ADAPTIVE} & set(systems):
        figures[name] += measure(point, systems[name], range(screening, seeds))
    figures["ours"] = measure(point, loop_system(), range(seeds))
    return Judged(point, figures, best)


def bars(judged: Sequence[Judged]) -> list[Bar]:
    verdict_bars = []
    for point_result in judged:
        seeds, where = len(point_result.figures["ours"]), str(point_result.point)
        verdict_bars.append(
            Bar(
                "1 static load",
                where,
                low_quantile(point_result.ratios(point_result.best)),
                LEAST_POINT,
                point_result.best,
                seeds,
            )
        )
        verdict_bars.append(
            Bar(
                "1 static load, of plain",
                where,
                low_quantile(point_result.ratios("plain")),
                LEAST_OF_PLAIN,
                "plain",
                seeds,
            )
        )
        if ADAPTIVE not in point_result.figures:
            continue
        least = LEAST_WHERE_NOTHING_PAYS if point_result.best == "plain" else LEAST_OF_ADAPTIVE
        verdict_bars.append(
            Bar("6 adaptive verification", where, low_quantile(point_result.ratios(ADAPTIVE)), least, ADAPTIVE, seeds)
        )
    return verdict_bars + _means(judged)


def _means(judged: Sequence[Judged]) -> list[Bar]:
    mean_bars = []
    for name in sorted({point_result.point.case.world for point_result in judged}):
        world_points = [point_result for point_result in judged if point_result.point.case.world == name]
        seeds = min(len(point_result.figures["ours"]) for point_result in world_points)
        for title, against, least in (
            ("1 static load, geometric mean", "", LEAST_MEAN),
            ("6 adaptive verification, geometric mean", ADAPTIVE, LEAST_ADAPTIVE_MEAN),
        ):
            compared = [point for point in world_points if not against or against in point.figures]
            if not compared:
                continue
            by_seed = [
                geometric_mean([point_result.ratios(against or point_result.best)[seed] for point_result in compared])
                for seed in range(seeds)
            ]
            mean_bars.append(
                Bar(title, name, low_quantile(by_seed), least, against or "each point's best static", seeds)
            )
    return mean_bars
