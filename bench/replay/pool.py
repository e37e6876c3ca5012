"""Bar 5: a pool on prompts of several categories, each of which suits another drafter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from outrider_runtime.control.data.batch import NOBODY, Batch
from outrider_runtime.control.data.plans import DraftPlan, Purpose
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.workload import Ints, Lengths, Workload, closed

from bench.replay.bars import Bar, best_on_means, low, paired
from bench.replay.cells import run
from bench.replay.settings import Case, System, ours, pool, recording_of, singles
from bench.replay.synthetic import MIXES

LEAST_OF_SINGLE, LEAST_OF_ORACLE, LEAST_ELSEWHERE, MUCH_TO_GAIN = 1.10, 0.90, 0.98, 1.2
LENGTHS = Lengths(300, 160)
ROUNDS = 7
ORACLE_LENGTHS = (1, 3, 5)


class PerRequest(Fixed):
    """Told each request's group (in its SLO class): the drafter of its group, at that drafter's length."""

    def __init__(self, drafters: Sequence[Drafter], drafter_of: Ints, lengths: Ints) -> None:
        super().__init__(drafters)
        self._drafter_of, self._lengths = drafter_of, lengths

    def plan_draft(self, batch: Batch) -> DraftPlan:
        asked = self._drafter_of[batch.slo_class]
        asked = np.where(self._lengths[asked] > 0, asked, NOBODY)
        numbers = np.arange(len(self._drafters))[:, None]
        passes = np.where((asked == numbers).any(1), self._lengths, 0)
        feed = np.where(asked == numbers, batch.missing, 0)
        return DraftPlan(passes, np.ones_like(passes), asked[None], feed, Purpose.FIXED)


def load(case: Case, requests: int, seed: int, *, told: bool = False) -> Workload:
    """`told`: each request's SLO class is the group of its prompt."""
    rng = np.random.default_rng([seed, requests, 19])
    real = recording_of(case)
    made = closed(requests, requests * ROUNDS + 8, real, case.group, rng, LENGTHS)
    return replace(made, slo_class=real.group[made.answer].astype(np.int64)) if told else made


def oracles(case: Case) -> Mapping[str, System]:
    """Each combination of lengths."""
    assert case.mix is not None
    best, names = MIXES[case.mix].best(), recording_of(case).groups
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
    """None where nobody knows which drafter suits whom: the recorded mix."""


def judge(case: Case, requests: int, seeds: int, screening: int) -> Pooled:
    """The best single drafter and the best oracle of a few seeds, and ours, with all."""
    single, figures = _best(case, requests, singles(case), seeds, screening, told=False)
    oracle = None
    if case.mix is not None:
        oracle, found = _best(case, requests, oracles(case), seeds, screening, told=True)
        figures |= found
    figures["ours"] = _measure(case, requests, ours(), range(seeds))
    return Pooled(case, requests, figures, single, oracle)


def _best(
    case: Case, requests: int, systems: Mapping[str, System], seeds: int, screening: int, *, told: bool
) -> tuple[str, dict[str, list[float]]]:
    screened = {name: _measure(case, requests, one, range(screening), told=told) for name, one in systems.items()}
    best = best_on_means(screened)
    return best, {best: screened[best] + _measure(case, requests, systems[best], range(screening, seeds), told=told)}


def _measure(case: Case, requests: int, system: System, seeds: Iterable[int], *, told: bool = False) -> list[float]:
    return [run(case, system, load(case, requests, seed, told=told), seed).goodput for seed in seeds]


def bars(one: Pooled) -> list[Bar]:
    mine, single = one.figures["ours"], one.figures[one.single]
    where, seeds = f"{one.case}, {one.requests} requests", len(mine)
    if one.oracle is None:
        return [Bar("5 pool, as recorded", where, low(paired(mine, single)), LEAST_ELSEWHERE, one.single, seeds)]
    oracle = one.figures[one.oracle]
    gain = float(np.mean(oracle)) / float(np.mean(single))
    where += f" (the oracle gains {gain - 1:.0%})"
    if gain < MUCH_TO_GAIN:
        return [Bar("5 pool", where, low(paired(mine, single)), LEAST_ELSEWHERE, one.single, seeds)]
    return [
        Bar("5 pool, of the best single drafter", where, low(paired(mine, single)), LEAST_OF_SINGLE, one.single, seeds),
        Bar("5 pool, of the oracle", where, low(paired(mine, oracle)), LEAST_OF_ORACLE, one.oracle, seeds),
    ]
