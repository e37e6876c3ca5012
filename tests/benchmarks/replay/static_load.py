"""Bar 1: at a static load, close to each point's best static setting; bar 6: against vLLM's adaptive verification;
bar 4: the same with a profile that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from outrider_runtime.core.cost import LatencyModel, StepCost
from outrider_runtime.simulate.replay.workload import Lengths, Workload, closed

from tests.benchmarks.replay.bars import Bar, best_on_means, geometric_mean, low, paired
from tests.benchmarks.replay.cells import run
from tests.benchmarks.replay.settings import Case, System, others, ours, recording

LEAST_POINT, LEAST_MEAN, LEAST_OF_PLAIN = 0.98, 1.00, 0.98
LEAST_OF_ADAPTIVE, LEAST_ADAPTIVE_MEAN, LEAST_WHERE_NOTHING_PAYS = 0.98, 1.00, 1.05
LEAST_WRONG = 0.95
ADAPTIVE = "adaptive verification"
ROUNDS = 10
LONG_CONTEXT = Lengths(8000, 128)


@dataclass(frozen=True, slots=True)
class Point:
    case: Case
    requests: int

    def __str__(self) -> str:
        return f"{self.case}, {self.requests} requests"


def load(point: Point, seed: int) -> Workload:
    """ROUNDS requests of each client, so that what is measured is no transient."""
    rng = np.random.default_rng([seed, point.requests])
    lengths = LONG_CONTEXT if point.case.world.endswith("long") else Lengths(300, 160)
    count = point.requests * ROUNDS + 8
    return closed(point.requests, count, recording(point.case.acceptance), point.case.group, rng, lengths)


def measure(point: Point, system: System, seeds: int) -> list[float]:
    return [run(point.case, system, load(point, seed), seed).goodput for seed in range(seeds)]


@dataclass(frozen=True, slots=True)
class Judged:
    """Goodput over seeds, by system."""

    point: Point
    figures: dict[str, list[float]]
    best: str
    """Of the static settings, plain decoding among them."""

    def ratios(self, to: str, mine: str = "ours") -> list[float]:
        return paired(self.figures[mine], self.figures[to])


def judge(point: Point, seeds: int, screening: int) -> Judged:
    """All others with a few seeds; ours, the best static one, plain and the adaptive one with all."""
    figures = {name: measure(point, one, screening) for name, one in others(point.case).items()}
    statics = {name: found for name, found in figures.items() if "k =" in name or name == "plain"}
    best = best_on_means(statics)
    for name in {best, "plain", ADAPTIVE}:
        figures[name] = measure(point, others(point.case)[name], seeds)
    figures["ours"] = measure(point, ours(), seeds)
    return Judged(point, figures, best)


def bars(judged: Sequence[Judged]) -> list[Bar]:
    found = []
    for one in judged:
        seeds, where = len(one.figures["ours"]), str(one.point)
        found.append(Bar("1 static load", where, low(one.ratios(one.best)), LEAST_POINT, one.best, seeds))
        found.append(Bar("1 static load, of plain", where, low(one.ratios("plain")), LEAST_OF_PLAIN, "plain", seeds))
        least = LEAST_WHERE_NOTHING_PAYS if one.best == "plain" else LEAST_OF_ADAPTIVE
        found.append(Bar("6 adaptive verification", where, low(one.ratios(ADAPTIVE)), least, ADAPTIVE, seeds))
    return found + _means(judged)


def _means(judged: Sequence[Judged]) -> list[Bar]:
    found = []
    for name in sorted({one.point.case.world for one in judged}):
        here = [one for one in judged if one.point.case.world == name]
        seeds = len(here[0].figures["ours"])
        for title, against, least in (
            ("1 static load, geometric mean", "", LEAST_MEAN),
            ("6 adaptive verification, geometric mean", ADAPTIVE, LEAST_ADAPTIVE_MEAN),
        ):
            by_seed = [geometric_mean([one.ratios(against or one.best)[seed] for one in here]) for seed in range(seeds)]
            found.append(Bar(title, name, low(by_seed), least, against or "each point's best static", seeds))
    return found


def knee_off(latency: LatencyModel) -> LatencyModel:
    """The knee of every mode 30% later than it is."""
    moved = {mode: replace(cost, knee_tokens=1.3 * cost.knee_tokens) for mode, cost in latency.target.items()}
    return replace(latency, target=moved)


def draft_dearer(latency: LatencyModel) -> LatencyModel:
    """The profile says of every draft two thirds of what it costs."""
    drafters = {
        name: replace(cost, cost=_times(cost.cost, 1 / 1.5), first_pass=_times(cost.first_pass, 1 / 1.5))
        for name, cost in latency.drafters.items()
    }
    return replace(latency, drafters=drafters)


def _times(cost: StepCost, factor: float) -> StepCost:
    values = {name: getattr(cost, name) * factor for name in StepCost.__dataclass_fields__ if name != "knee_tokens"}
    return replace(cost, **values)


WRONG = {"the knee 30% off": knee_off, "drafts 1.5 times dearer": draft_dearer}


def wrong_models(judged: Sequence[Judged]) -> list[Bar]:
    """Bar 4, against what bar 1 got at the same points."""
    found = []
    for one in judged:
        seeds = len(one.figures["ours"])
        for name, distort in WRONG.items():
            figures = measure(one.point, ours(distort=distort), seeds)
            ratio = low(paired(figures, one.figures["ours"]))
            found.append(Bar(f"4 {name}", str(one.point), ratio, LEAST_WRONG, "ours with its own profile", seeds))
    return found
