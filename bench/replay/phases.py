"""Bar 2: load and prompts that shift, and the arrivals of a trace, compared with hindsight and plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_answers, open_load

from bench.replay.bars import Bar, best_on_means, low_quantile, share_of_gap
from bench.replay.cells import Result, run
from bench.replay.settings import Case, System, case_recording, loop_system, singles

LEAST_CLOSED, LEAST_OF_SINGLE, SMALL_GAP = 0.6, 1 / 1.01, 0.03
LENGTHS = Lengths(300, 128)
DONE = 0.95
"""Share of the requests that ends a phase's measurement: the last few run in a batch that empties."""
COMPARED = ("ours", "plain", "single", "oracle")


@dataclass(frozen=True, slots=True)
class Phase:
    seconds: float
    rate_per_s: float
    group: str | None = None
    overloaded: bool = False
    """Whether more arrives than can be served. Goodput is compared then: latency depends on the phase's length."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A load in phases."""

    name: str
    case: Case
    phases: tuple[Phase, ...]
    arrivals_s: tuple[float, ...] | None = None
    """Arrival times of a trace; None: Poisson at each phase's rate."""

    def ends_s(self) -> NDArray[np.float64]:
        return np.cumsum([phase.seconds for phase in self.phases])

    def shares(self) -> NDArray[np.float64]:
        """Return (phases,): shares of the requests that are expected in each phase."""
        weight = np.array([phase.seconds * phase.rate_per_s for phase in self.phases])
        return np.asarray(weight / weight.sum())


def load(shift: Shift, seed: int) -> Workload:
    """Draw the arrivals, with prompts of each phase's group."""
    rng = np.random.default_rng([seed, 11])
    at_s = np.array(shift.arrivals_s) if shift.arrivals_s is not None else _poisson(shift, rng)
    real = case_recording(shift.case)
    phase = _find_phases(shift, at_s)
    answers = np.zeros(len(at_s), np.int64)
    for number, shift_phase in enumerate(shift.phases):
        answers[phase == number] = draw_answers(real, shift_phase.group, int((phase == number).sum()), rng)
    made = open_load(at_s, real, None, rng, LENGTHS)
    return Workload(made.at_s, made.prompt, made.output, made.slo_class, answers)


def _poisson(shift: Shift, rng: np.random.Generator) -> NDArray[np.float64]:
    times, start = [], 0.0
    for phase in shift.phases:
        count = int(rng.poisson(phase.rate_per_s * phase.seconds))
        times.append(start + np.sort(rng.uniform(0, phase.seconds, count)))
        start += phase.seconds
    return np.concatenate(times)


def _find_phases(shift: Shift, at_s: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.asarray(np.searchsorted(shift.ends_s(), at_s, side="right").clip(0, len(shift.phases) - 1), np.int64)


def speeds(shift: Shift, load: Workload, result: Result) -> NDArray[np.float64]:
    """Return (phases,): 1 / mean latency of the requests that arrived in a phase (higher is better).

    In an overloaded phase it is their tokens / seconds from the phase's start until DONE of them are answered. Without
    requests it is 1.
    """
    phase, phase_speeds = _find_phases(shift, result.arrived_s), np.ones(len(shift.phases))
    latency, starts = (
        result.done_s - result.arrived_s,
        shift.ends_s() - [shift_phase.seconds for shift_phase in shift.phases],
    )
    for number, shift_phase in enumerate(shift.phases):
        in_phase = phase == number
        if in_phase.any() and shift_phase.overloaded:
            phase_speeds[number] = load.output[in_phase].sum() / (
                np.quantile(result.done_s[in_phase], DONE) - starts[number]
            )
        elif in_phase.any():
            phase_speeds[number] = 1 / latency[in_phase].mean()
    return phase_speeds


@dataclass(frozen=True, slots=True)
class Shifted:
    """Speeds, (seeds, phases) each; the oracle has each phase's best setting in hindsight."""

    shift: Shift
    ours: NDArray[np.float64]
    plain: NDArray[np.float64]
    single: NDArray[np.float64]
    oracle: NDArray[np.float64]
    best: str
    chosen: tuple[str, ...]
    """The oracle's setting in each phase."""

    def whole(self, speed: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (seeds,): geometric mean over the phases, weighted by their requests."""
        return np.asarray(np.exp(np.log(speed) @ self.shift.shares()))


def judge(shift: Shift, seeds: int, screening: int) -> Shifted:
    """Screen all single settings with a few seeds; measure ours, plain, the best one and the oracle's with all."""
    systems = singles(shift.case)
    screened = {name: _measure(shift, system, range(screening)) for name, system in systems.items()}
    means = {name: np.log(system).mean(0) for name, system in screened.items()}  # (phases,)
    best = best_on_means({name: [float(system @ shift.shares())] for name, system in means.items()})
    chosen = tuple(
        best_on_means({name: [float(system[phase])] for name, system in means.items()})
        for phase in range(len(shift.phases))
    )
    for name in {best, "plain", *chosen}:
        screened[name] = np.concatenate([screened[name], _measure(shift, systems[name], range(screening, seeds))])
    oracle = np.stack([screened[name][:, phase] for phase, name in enumerate(chosen)], axis=1)
    mine = _measure(shift, loop_system(), range(seeds))
    return Shifted(shift, mine, screened["plain"], screened[best], oracle, best, chosen)


def _measure(shift: Shift, system: System, seeds: Iterable[int]) -> NDArray[np.float64]:
    """Measure the speeds, (seeds, phases)."""
    loads = [(seed, load(shift, seed)) for seed in seeds]
    rows = [speeds(shift, phase_load, run(shift.case, system, phase_load, seed)) for seed, phase_load in loads]
    return np.array(rows).reshape(len(rows), len(shift.phases))


def bars(shifted: Sequence[Shifted]) -> list[Bar]:
    return [bar for judged in shifted for bar in (_against_hindsight(judged), _against_plain(judged))]


def _against_hindsight(shifted: Shifted) -> Bar:
    mine, single, oracle = (shifted.whole(speed) for speed in (shifted.ours, shifted.single, shifted.oracle))
    gap = float(np.exp(np.mean(np.log(oracle / single)))) - 1
    where, seeds = f"{shifted.shift.name}, {shifted.shift.case} (hindsight gains {gap:.1%})", len(mine)
    if gap < SMALL_GAP:
        return Bar("2 shifts", where, low_quantile((mine / single).tolist()), LEAST_OF_SINGLE, shifted.best, seeds)
    closed = share_of_gap(np.log(mine), np.log(single), np.log(oracle))
    return Bar(
        "2 shifts, gap closed",
        where,
        low_quantile(closed.tolist()),
        LEAST_CLOSED,
        f"{shifted.best} and hindsight",
        seeds,
    )


def _against_plain(shifted: Shifted) -> Bar:
    """Compare with plain decoding, in the worst phase."""
    by_phase = [
        low_quantile((mine / plain).tolist()) for mine, plain in zip(shifted.ours.T, shifted.plain.T, strict=True)
    ]
    worst = int(np.argmin(by_phase))
    where = f"{shifted.shift.name}, {shifted.shift.case}, phase {worst + 1}"
    return Bar("2 shifts, of plain decoding", where, by_phase[worst], LEAST_OF_SINGLE, "plain", len(shifted.ours))
