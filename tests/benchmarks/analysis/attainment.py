"""Bar 6: the share of requests that met their class's TPOT, and requests a second that did, over rising load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.analysis.bar import Bar, judged
from tests.benchmarks.analysis.statistics import Estimate, Interval, bootstrap, is_odd
from tests.benchmarks.evidence.load import Outcome
from tests.benchmarks.evidence.raw import Run
from tests.benchmarks.evidence.scenario import System, SystemKind

STOCK_FALLS_BELOW = 0.7
MISSES_BOUND = 0.6
Limits = Mapping[str, float]
"""TPOT of each class, in seconds."""


@dataclass(frozen=True)
class Attained:
    """One system at one load."""

    load: str
    system: str
    attainment: float
    per_class: dict[str, float]
    request_goodput: float
    """Requests a second that met their SLO."""


def attained(runs: Sequence[Run], limits: Limits) -> list[Attained]:
    """Over all repeats, loads in the order in which they were run."""
    loads = list(dict.fromkeys(point.name for run in runs for point in run.points))
    systems = sorted({run.system for run in runs})
    return [_attained(runs, load, system, limits) for load in loads for system in systems]


def bars(scenario: int, runs: Sequence[Run], systems: Mapping[str, System], limits: Limits) -> list[Bar]:
    return [_everywhere(scenario, runs, systems, limits), _misses(scenario, runs, systems, limits)]


def _attained(runs: Sequence[Run], load: str, system: str, limits: Limits) -> Attained:
    met = _met(runs, load, system, limits)
    outcomes = list(_outcomes(runs, load, system))
    seconds = sum(point.seconds for run in runs if run.system == system for point in run.points if point.name == load)
    per_class = {
        name: float(np.mean([_is_met(one, limits) for one in outcomes if one.slo_class == name]))
        for name in sorted({one.slo_class for one in outcomes})
    }
    return Attained(load, system, float(met.mean()), per_class, float(met.sum()) / seconds)


def _everywhere(scenario: int, runs: Sequence[Run], systems: Mapping[str, System], limits: Limits) -> Bar:
    """Within noise: the 95% interval of (ours - baseline) reaches zero."""
    text = "attainment, ours less every baseline's, at the worst load: the 95% interval's upper end"
    bar = Bar(scenario, text, 0.0, at_least=True)
    ours, baselines = _names(runs, systems)
    pairs = [
        (_difference(runs, load, ours, baseline, limits), load, baseline)
        for load in _loads(runs)
        for baseline in baselines
        if ours
    ]
    known = [(found.interval[1], found, load, name) for found, load, name in pairs if found.interval is not None]
    if not known:
        return bar
    upper, found, load, name = min(known, key=lambda one: one[0])
    mine, theirs = (float(one.mean()) for one in _beside_each_other(runs, load, ours, name, limits))
    return judged(
        replace(
            bar, ours=mine, baseline=f"{name} ({load})", best_baseline=theirs, ratio=upper, interval=found.interval
        )
    )  # fmt: skip


def _misses(scenario: int, runs: Sequence[Run], systems: Mapping[str, System], limits: Limits) -> Bar:
    """The best baseline is chosen on odd repeats; both are compared on even ones."""
    text = "misses by the best baseline's, at the load at which stock first attains less than 70%"
    bar = Bar(scenario, text, MISSES_BOUND, at_least=False)
    ours, baselines = _names(runs, systems)
    odd, even = ([run for run in runs if is_odd(run.repeat) is odd] for odd in (True, False))
    load = _first_below(runs, systems, limits)
    if not ours or not odd or not even or load is None:
        return replace(bar, note="stock attains 70% at every load" if runs and load is None else "")
    best = max(baselines, key=lambda name: _met(odd, load, name, limits).mean())
    mine, theirs = _beside_each_other(even, load, ours, best, limits)
    if theirs.all():
        return replace(bar, note=f"{best} missed none at {load}")
    return judged(
        replace(
            bar, ours=1 - float(mine.mean()), baseline=f"{best} ({load})", best_baseline=1 - float(theirs.mean()),
            ratio=float((1 - mine.mean()) / (1 - theirs.mean())), interval=_misses_interval(mine, theirs),
        )
    )  # fmt: skip


def _misses_interval(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> Interval | None:
    """Both systems had the same requests in the same order."""
    if len(mine) != len(theirs):
        return None
    pairs = (1 - mine) + 1j * (1 - theirs)  # one observation, two numbers

    def ratio(rows: NDArray[np.complex128]) -> NDArray[np.float64]:
        return np.asarray(rows.real.mean(axis=1) / np.maximum(rows.imag.mean(axis=1), 1e-9))

    return bootstrap(pairs, ratio)  # type: ignore[arg-type]


def _difference(runs: Sequence[Run], load: str, ours: str, baseline: str, limits: Limits) -> Estimate:
    mine, theirs = _beside_each_other(runs, load, ours, baseline, limits)
    if len(mine) != len(theirs):
        return Estimate(float(mine.mean() - theirs.mean()), None)
    differences = mine - theirs
    return Estimate(float(differences.mean()), bootstrap(differences, lambda rows: rows.mean(axis=1)))


def _beside_each_other(
    runs: Sequence[Run], load: str, ours: str, baseline: str, limits: Limits
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What each met where they took turns: ours is up in sittings without this baseline, too."""
    shared = {(run.repeat, run.sitting) for run in runs if run.system == baseline}
    there = [run for run in runs if (run.repeat, run.sitting) in shared]
    return _met(there, load, ours, limits), _met(there, load, baseline, limits)


def _first_below(runs: Sequence[Run], systems: Mapping[str, System], limits: Limits) -> str | None:
    stock = [name for name in sorted({run.system for run in runs}) if systems[name].kind is SystemKind.STOCK]
    for load in _loads(runs):
        if stock and _met(runs, load, stock[0], limits).mean() < STOCK_FALLS_BELOW:
            return load
    return None


def _names(runs: Sequence[Run], systems: Mapping[str, System]) -> tuple[str, list[str]]:
    names = sorted({run.system for run in runs})
    ours = next((name for name in names if systems[name].kind is SystemKind.OURS), "")
    return ours, [name for name in names if systems[name].kind is not SystemKind.OURS]


def _loads(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(point.name for run in runs for point in run.points))


def _outcomes(runs: Sequence[Run], load: str, system: str) -> Iterable[Outcome]:
    for run in sorted(runs, key=lambda one: (one.repeat, one.sitting)):
        if run.system == system:
            yield from (one for point in run.points if point.name == load for one in point.outcomes)


def _met(runs: Sequence[Run], load: str, system: str, limits: Limits) -> NDArray[np.float64]:
    """1.0 for each request that met its class's TPOT, 0.0 for each that did not."""
    return np.array([_is_met(one, limits) for one in _outcomes(runs, load, system)], dtype=float)


def _is_met(outcome: Outcome, limits: Limits) -> bool:
    return outcome.tpot_s <= limits[outcome.slo_class]
