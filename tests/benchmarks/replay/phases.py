"""Bar 2: load and prompts that shift, and the arrivals of a trace. How much of what hindsight could gain is gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.simulate.replay.workload import Lengths, Workload, answers_of, open_load

from tests.benchmarks.replay.bars import Bar, best_on_means, closed_gap, low
from tests.benchmarks.replay.cells import Result, run
from tests.benchmarks.replay.settings import Case, System, others, ours, recording

LEAST_CLOSED, LEAST_OF_SINGLE, SMALL_GAP = 0.6, 1 / 1.01, 0.03
LENGTHS = Lengths(300, 128)


@dataclass(frozen=True, slots=True)
class Phase:
    seconds: float
    rate_per_s: float
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Shift:
    """A load in phases."""

    name: str
    case: Case
    phases: tuple[Phase, ...]

    def ends_s(self) -> NDArray[np.float64]:
        return np.cumsum([phase.seconds for phase in self.phases])


def load(shift: Shift, seed: int) -> Workload:
    """Poisson arrivals at each phase's rate, with prompts of its group."""
    rng = np.random.default_rng([seed, 11])
    times, answers, start = [], [], 0.0
    real = recording(shift.case.acceptance)
    for phase in shift.phases:
        count = int(rng.poisson(phase.rate_per_s * phase.seconds))
        times.append(start + np.sort(rng.uniform(0, phase.seconds, count)))
        answers.append(answers_of(real, phase.group, count, rng))
        start += phase.seconds
    made = open_load(np.concatenate(times), real, None, rng, LENGTHS)
    return Workload(made.at_s, made.prompt, made.output, made.slo_class, np.concatenate(answers))


def latency_by_phase(shift: Shift, result: Result) -> NDArray[np.float64]:
    """(phases,) mean seconds of the requests that came in each; the smaller the better."""
    phase = np.searchsorted(shift.ends_s(), result.arrived_s, side="right").clip(0, len(shift.phases) - 1)
    latency = result.done_s - result.arrived_s
    return np.array(
        [latency[phase == one].mean() if (phase == one).any() else np.nan for one in range(len(shift.phases))]
    )


@dataclass(frozen=True, slots=True)
class Shifted:
    """Speed over seeds (1 by mean latency), by system; the oracle's is each phase's best in hindsight."""

    shift: Shift
    ours: list[float]
    singles: dict[str, list[float]]
    oracle: list[float]


def judge(shift: Shift, seeds: int) -> Shifted:
    statics = {name: one for name, one in others(shift.case).items() if "k =" in name or name == "plain"}
    by_phase = {name: [_phases(shift, one, seed) for seed in range(seeds)] for name, one in statics.items()}
    mine = [_phases(shift, ours(), seed) for seed in range(seeds)]
    shares = _shares(shift)
    means = {name: np.mean(found, axis=0) for name, found in by_phase.items()}
    chosen = [best_on_means({name: [-mean[phase]] for name, mean in means.items()}) for phase in range(len(shares))]
    oracle = [
        _speed(np.array([by_phase[name][seed][phase] for phase, name in enumerate(chosen)]), shares)
        for seed in range(seeds)
    ]
    singles = {name: [_speed(one, shares) for one in found] for name, found in by_phase.items()}
    return Shifted(shift, [_speed(one, shares) for one in mine], singles, oracle)


def _phases(shift: Shift, system: System, seed: int) -> NDArray[np.float64]:
    return latency_by_phase(shift, run(shift.case, system, load(shift, seed), seed))


def _shares(shift: Shift) -> NDArray[np.float64]:
    """Of the requests, by phase."""
    weight = np.array([phase.seconds * phase.rate_per_s for phase in shift.phases])
    return np.asarray(weight / weight.sum())


def _speed(latency_s: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    return 1.0 / float((latency_s * shares).sum())


def bars(shifted: Sequence[Shifted]) -> list[Bar]:
    found = []
    for one in shifted:
        single = best_on_means(one.singles)
        gap = float(np.mean(one.oracle)) / float(np.mean(one.singles[single])) - 1
        where = f"{one.shift.name}, {one.shift.case} (hindsight gains {gap:.1%})"
        plain = [mine / base for mine, base in zip(one.ours, one.singles["plain"], strict=True)]
        found.append(Bar("2 shifts, of plain's latency", where, low(plain), LEAST_OF_SINGLE, "plain", len(plain)))
        if gap < SMALL_GAP:
            ratios = [mine / best for mine, best in zip(one.ours, one.singles[single], strict=True)]
            found.append(Bar("2 shifts", where, low(ratios), LEAST_OF_SINGLE, single, len(ratios)))
            continue
        closed = [
            closed_gap(mine, best, oracle)
            for mine, best, oracle in zip(one.ours, one.singles[single], one.oracle, strict=True)
        ]
        found.append(
            Bar("2 shifts, gap closed", where, low(closed), LEAST_CLOSED, f"{single} and the oracle", len(closed))
        )
    return found
