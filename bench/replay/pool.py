"""Bar 5: a pool on prompts of several categories, each of which suits another drafter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from outrider_runtime.control.batch import NO_DRAFTER, Batch
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.workload import Ints, Lengths, Workload, draw_closed_load

from bench.replay.bars import Bar, best_on_means, geometric_mean, low_quantile, pair_ratios
from bench.replay.cells import run
from bench.replay.settings import Case, System, case_recording, loop_system, pool, singles
from bench.replay.synthetic import MIXES

LEAST_OF_SINGLE, LEAST_OF_ORACLE, LEAST_ELSEWHERE, MUCH_TO_GAIN = 1.10, 0.90, 0.98, 1.2
LEAST_BLOCK_MEAN = 1.00
LENGTHS = Lengths(300, 160)
ROUNDS = 7
ORACLE_LENGTHS = (1, 3, 5)


class PerRequest(Fixed):
    """Knows each request's group (from its SLO class), and uses the drafter and length of that group."""

    def __init__(self, drafters: Sequence[Drafter], drafter_of: Ints, lengths: Ints) -> None:
        super().__init__(drafters)
        self._drafter_of, self._lengths = drafter_of, lengths

    def plan_draft(self, batch: Batch) -> DraftPlan:
        drafter_order = self._drafter_of[batch.slo_class]
        drafter_order = np.where(self._lengths[drafter_order] > 0, drafter_order, NO_DRAFTER)
        numbers = np.arange(len(self._drafters))[:, None]
        passes = np.where((drafter_order == numbers).any(1), self._lengths, 0)
        feed = np.where(drafter_order == numbers, batch.missing, 0)
        return DraftPlan(passes, np.ones_like(passes), drafter_order[None], feed, Purpose.FIXED)


def load(case: Case, requests: int, seed: int, *, knows_classes: bool = False) -> Workload:
    """Draw the load. knows_classes: whether each request's SLO class is the group of its prompt."""
    rng = np.random.default_rng([seed, requests, 19])
    real = case_recording(case)
    made = draw_closed_load(requests, requests * ROUNDS + 8, real, case.group, rng, LENGTHS)
    return replace(made, slo_class=real.group[made.answer].astype(np.int64)) if knows_classes else made


def oracles(case: Case) -> Mapping[str, System]:
    """Return a system for every combination of draft lengths."""
    assert case.mix is not None
    best, names = MIXES[case.mix].best_drafters(), case_recording(case).groups
    drafter_of = np.array([best[name] for name in names])
    return {
        f"oracle {lengths}": _oracle(drafter_of, lengths) for lengths in product(ORACLE_LENGTHS, repeat=len(pool(case)))
    }


def _oracle(drafter_of: Ints, lengths: tuple[int, ...]) -> System:
    return System(f"oracle {lengths}", lambda case, _: PerRequest(pool(case), drafter_of, np.array(lengths)))


@dataclass(frozen=True, slots=True)
class Pooled:
    case: Case
    requests: int
    figures: dict[str, list[float]]
    single: str
    oracle: str | None
    """Name of the best oracle; None for the recorded mix, in which a request's best drafter is not known."""


def judge(case: Case, requests: int, seeds: int, screening: int) -> Pooled:
    """Find the best single drafter and the best oracle with a few seeds; measure these and ours with all."""
    single, figures = _find_best(case, requests, singles(case), seeds, screening, knows_classes=False)
    oracle = None
    if case.mix is not None:
        oracle, oracle_figures = _find_best(case, requests, oracles(case), seeds, screening, knows_classes=True)
        figures |= oracle_figures
    figures["ours"] = _measure(case, requests, loop_system(), range(seeds))
    return Pooled(case, requests, figures, single, oracle)


def _find_best(
    case: Case, requests: int, systems: Mapping[str, System], seeds: int, screening: int, *, knows_classes: bool
) -> tuple[str, dict[str, list[float]]]:
    screened = {
        name: _measure(case, requests, system, range(screening), knows_classes=knows_classes)
        for name, system in systems.items()
    }
    best = best_on_means(screened)
    return best, {
        best: screened[best]
        + _measure(case, requests, systems[best], range(screening, seeds), knows_classes=knows_classes)
    }


def _measure(
    case: Case, requests: int, system: System, seeds: Iterable[int], *, knows_classes: bool = False
) -> list[float]:
    return [run(case, system, load(case, requests, seed, knows_classes=knows_classes), seed).goodput for seed in seeds]


def bars(pooled: Pooled) -> list[Bar]:
    mine, single = pooled.figures["ours"], pooled.figures[pooled.single]
    where, seeds = f"{pooled.case}, {pooled.requests} requests", len(mine)
    if pooled.oracle is None:
        return [
            Bar(
                "5 pool, as recorded",
                where,
                low_quantile(pair_ratios(mine, single)),
                LEAST_ELSEWHERE,
                pooled.single,
                seeds,
            )
        ]
    oracle = pooled.figures[pooled.oracle]
    gain = float(np.mean(oracle)) / float(np.mean(single))
    where += f" (the oracle gains {gain - 1:.0%})"
    if gain < MUCH_TO_GAIN:
        return [Bar("5 pool", where, low_quantile(pair_ratios(mine, single)), LEAST_ELSEWHERE, pooled.single, seeds)]
    return [
        Bar(
            "5 pool, of the best single drafter",
            where,
            low_quantile(pair_ratios(mine, single)),
            LEAST_OF_SINGLE,
            pooled.single,
            seeds,
        ),
        Bar(
            "5 pool, of the oracle",
            where,
            low_quantile(pair_ratios(mine, oracle)),
            LEAST_OF_ORACLE,
            pooled.oracle,
            seeds,
        ),
    ]


def block_bars(judged: Sequence[Pooled]) -> list[Bar]:
    """Judge every point against its best single drafter or plain decoding, and the mean of all points."""
    name, bars, means = "5 pool with a block head", list[Bar](), list[float]()
    for point in judged:
        ratios = pair_ratios(point.figures["ours"], point.figures[point.single])
        where = f"{point.case}, {point.requests} requests"
        bars.append(Bar(name, where, low_quantile(ratios), LEAST_ELSEWHERE, point.single, len(ratios)))
        means.append(float(np.mean(ratios)))
    where = f"mean of {len(judged)} points"
    return [*bars, Bar(name, where, geometric_mean(means), LEAST_BLOCK_MEAN, "each point's best", bars[0].seeds)]
