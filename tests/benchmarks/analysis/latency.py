"""Bars 3, 4 and 5: request latency of every phase against that phase's best static setting, and of the whole run.

Every system gets the same requests in a repeat, and ours is up beside each of the others, so that ratios are taken
request by request of those that took turns. The best static setting is chosen on odd repeats and compared on even ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.benchmarks.analysis.bar import Bar, judged
from tests.benchmarks.analysis.statistics import Estimate, bootstrap, geometric_mean, is_odd
from tests.benchmarks.evidence.raw import Run
from tests.benchmarks.evidence.scenario import System, SystemKind

PHASE_BOUND = 1.05
WHOLE_BOUND = 0.95
WHOLE = "the whole run"

Key = tuple[int, int, int]
"""(repeat, sitting, index of the request in it)."""


@dataclass(frozen=True)
class Compared:
    """Ours against the best static setting, in a phase or over the whole run; geometric means of seconds."""

    phase: str
    best: str
    ours_s: float
    best_s: float
    ratio: Estimate


def phases(runs: Sequence[Run]) -> list[str]:
    """In the order in which they were run."""
    return list(dict.fromkeys(one.phase for run in runs for point in run.points for one in point.outcomes))


def latencies(runs: Iterable[Run], system: str, phase: str) -> dict[Key, float]:
    """Seconds; every phase's where `phase` is WHOLE."""
    found: dict[Key, float] = {}
    for run in runs:
        if run.system != system:
            continue
        outcomes = [one for point in run.points for one in point.outcomes]
        found |= {
            (run.repeat, run.sitting, index): one.latency_s
            for index, one in enumerate(outcomes)
            if phase in (WHOLE, one.phase)
        }  # fmt: skip
    return found


def compare(runs: Sequence[Run], systems: Mapping[str, System]) -> list[Compared]:
    """One for each phase, then one for the whole run; those without an odd or an even repeat are left out."""
    found = (_compare(runs, systems, phase) for phase in (*phases(runs), WHOLE))
    return [one for one in found if one is not None]


def switching(runs: Sequence[Run], systems: Mapping[str, System]) -> float | None:
    """Latency of one that is each phase's best static setting in turn, by that of the best single one; geometric means.

    Chosen on the very repeats that it is compared on, so luck counts for it: whoever only switches between static
    settings where a phase begins cannot do better. None where there is nothing to switch: one phase, or nothing that
    was compared.
    """
    of_phase = [_by_ours(runs, systems, phase) for phase in phases(runs)]
    whole = _by_ours(runs, systems, WHOLE)
    if len(of_phase) < 2 or not whole or not all(of_phase):
        return None
    requests = [
        len({(repeat, index) for name in systems for repeat, _, index in latencies(runs, name, phase)})
        for phase in phases(runs)
    ]
    best_of_each = np.average([min(one.values()) for one in of_phase], weights=requests)
    return math.exp(float(best_of_each) - min(whole.values()))


def bars(scenario: int, compared: Sequence[Compared], switched: float | None = None) -> list[Bar]:
    """switched: see `switching`; goes into the note."""
    return [_phases_bar(scenario, compared), _whole_bar(scenario, compared, switched)]


def _by_ours(runs: Sequence[Run], systems: Mapping[str, System], phase: str) -> dict[str, float]:
    """Static setting -> logarithm of its latency by ours, mean over the requests of all repeats."""
    return {
        name: -math.log(_of_theirs(list(both.values()))) for name, both in _paired(runs, systems, phase).items() if both
    }


def _paired(
    runs: Sequence[Run], systems: Mapping[str, System], phase: str
) -> dict[str, dict[Key, tuple[float, float]]]:
    """Static setting -> latencies of ours and of it; empty without ours."""
    names = sorted({run.system for run in runs})
    ours = next((name for name in names if systems[name].kind is SystemKind.OURS), None)
    if ours is None:
        return {}
    mine = latencies(runs, ours, phase)
    return {
        name: _pairs(mine, latencies(runs, name, phase))
        for name in names
        if systems[name].kind in (SystemKind.STOCK, SystemKind.STATIC)
    }


def _compare(runs: Sequence[Run], systems: Mapping[str, System], phase: str) -> Compared | None:
    pairs = _paired(runs, systems, phase)
    odd = {name: seen for name, both in pairs.items() if (seen := _only(both, odd=True))}
    if not odd:
        return None
    best = max(odd, key=lambda name: _of_theirs(odd[name]))
    even = _only(pairs[best], odd=False)
    if not even:
        return None
    ours_s, best_s = (geometric_mean([pair[index] for pair in even]) for index in (0, 1))
    return Compared(phase, best, ours_s, best_s, _ratio([math.log(mine / theirs) for mine, theirs in even]))


def _pairs(mine: Mapping[Key, float], theirs: Mapping[Key, float]) -> dict[Key, tuple[float, float]]:
    return {key: (mine[key], theirs[key]) for key in sorted(mine.keys() & theirs.keys())}


def _of_theirs(pairs: Sequence[tuple[float, float]]) -> float:
    return geometric_mean([mine / theirs for mine, theirs in pairs])


def _ratio(logs: Sequence[float]) -> Estimate:
    observations = np.asarray(logs)
    return Estimate(float(np.exp(observations.mean())), bootstrap(observations, lambda rows: np.exp(rows.mean(axis=1))))


def _only(pairs: Mapping[Key, tuple[float, float]], *, odd: bool) -> list[tuple[float, float]]:
    return [pair for key, pair in pairs.items() if is_odd(key[0]) is odd]


def _phases_bar(scenario: int, compared: Sequence[Compared]) -> Bar:
    text = "request latency by the phase's best static setting, geometric mean, in the worst phase"
    bar = Bar(scenario, text, PHASE_BOUND, at_least=False)
    of_phase = [one for one in compared if one.phase != WHOLE]
    if not of_phase:
        return bar
    worst = max(of_phase, key=lambda one: one.ratio.value)
    note = "; ".join(f"{one.phase}: {one.ratio.value:.2f} of {one.best}" for one in of_phase)
    return judged(replace(_filled(bar, worst), note=note))


def _whole_bar(scenario: int, compared: Sequence[Compared], switched: float | None) -> Bar:
    text = "request latency by the best single static setting, geometric mean, over the whole run"
    bar = Bar(scenario, text, WHOLE_BOUND, at_least=False)
    whole = [one for one in compared if one.phase == WHOLE]
    if not whole:
        return bar
    note = "" if switched is None else f"each phase's best static setting in turn, by hindsight: {switched:.2f}"
    return judged(replace(_filled(bar, whole[0]), note=note))


def _filled(bar: Bar, one: Compared) -> Bar:
    return replace(
        bar, ours=one.ours_s, baseline=f"{one.best} ({one.phase})", best_baseline=one.best_s, ratio=one.ratio.value,
        interval=one.ratio.interval,
    )  # fmt: skip
