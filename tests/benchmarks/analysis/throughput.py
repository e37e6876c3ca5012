"""Bars 1 and 2: tokens a second of every point, ours against no speculation and against the best static setting.

A setting is one draft length of one drafter, none included. The best one of a point is chosen on odd repeats and
compared on even ones: chosen and compared on the same, it would be the luckiest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tests.benchmarks.analysis.bar import Bar, judged
from tests.benchmarks.analysis.statistics import Estimate, geometric_estimate, geometric_mean, is_odd
from tests.benchmarks.evidence.raw import Run
from tests.benchmarks.evidence.scenario import System, SystemKind

WORTHWHILE_GAIN = 1.15
KEPT_GAIN = 0.8
OF_BEST = 0.97
NO_POINT_BELOW = 0.93
OF_NONE = 0.98
DRAFTERS_THAT_GAIN = 2

Speeds = dict[str, dict[str, dict[int, float]]]
"""point -> system -> repeat -> tokens a second."""


@dataclass(frozen=True)
class Compared:
    """One point and one drafter."""

    point: str
    drafter: str
    ours: str
    best: str
    """Name of the best static setting by the odd repeats."""
    ours_tokens_per_s: float
    best_tokens_per_s: float
    none_tokens_per_s: float
    """Medians over the even repeats."""
    of_best: Estimate
    """Ours by the best static setting, within even repeats."""
    of_none: Estimate
    """Ours by no speculation, within all repeats: nothing was chosen."""
    best_of_none: float

    @property
    def gain_kept(self) -> float:
        """Part of the best static setting's gain over none."""
        ours_of_none = self.ours_tokens_per_s / self.none_tokens_per_s
        return (ours_of_none - 1) / (self.best_of_none - 1)

    @property
    def worthwhile(self) -> bool:
        return self.best_of_none >= WORTHWHILE_GAIN


def speeds(runs: Sequence[Run], systems: Mapping[str, System]) -> Speeds:
    """Of systems that were in different sittings too: each sitting is brought to one measure by what the reference did
    in it, as the machine is another one half an hour later."""
    reference = next((name for name in systems if systems[name].reference and any(r.system == name for r in runs)), "")
    found: Speeds = {}
    for name in dict.fromkeys(point.name for run in runs for point in run.points):
        for repeat in sorted({run.repeat for run in runs}):
            of_sitting = _of_sitting(runs, name, repeat)
            for system, speed in _in_one_measure(of_sitting, reference).items():
                found.setdefault(name, {}).setdefault(system, {})[repeat] = speed
    return found


def _of_sitting(runs: Sequence[Run], point_name: str, repeat: int) -> list[dict[str, float]]:
    """For each sitting, tokens a second of the systems in it."""
    found: dict[int, dict[str, float]] = {}
    for run in runs:
        for point in run.points:
            if run.repeat == repeat and point.name == point_name:
                found.setdefault(run.sitting, {})[run.system] = point.tokens_per_s
    return list(found.values())


def _in_one_measure(of_sitting: Sequence[Mapping[str, float]], reference: str) -> dict[str, float]:
    """The reference's own speed is the geometric mean of its sittings; a sitting without it stays as it is."""
    seen = [speeds[reference] for speeds in of_sitting if reference in speeds]
    mean = geometric_mean(seen) if seen else 1.0
    return {
        system: speed * mean / speeds.get(reference, mean) for speeds in of_sitting for system, speed in speeds.items()
    }


def compare(runs: Sequence[Run], systems: Mapping[str, System]) -> list[Compared]:
    """Every (point, drafter) that has all it takes: ours, none and a static setting in odd and in even repeats."""
    found = []
    for point, of_system in speeds(runs, systems).items():
        for drafter in _drafters(of_system, systems):
            compared = _compare(point, drafter, of_system, systems)
            if compared is not None:
                found.append(compared)
    return found


def bars(scenario: int, compared: Sequence[Compared]) -> list[Bar]:
    return [
        _kept(scenario, compared),
        _of_best(scenario, compared),
        _worst(scenario, compared),
        _none(scenario, compared),
    ]


def drafters_bar(compared: Sequence[Compared]) -> Bar:
    """Over scenarios 1 and 2 together."""
    text = "drafters with a point where the best static setting gains 1.15 or more"
    if not compared:
        return Bar(1, text, DRAFTERS_THAT_GAIN, at_least=True)
    gaining = sorted({one.drafter for one in compared if one.worthwhile})
    return judged(
        Bar(1, text, DRAFTERS_THAT_GAIN, True, ratio=float(len(gaining)), note=", ".join(gaining) or "none gains")
    )


def _compare(
    point: str, drafter: str, of_system: Mapping[str, Mapping[int, float]], systems: Mapping[str, System]
) -> Compared | None:
    none = _of_kind(of_system, systems, SystemKind.STOCK)
    statics = [name for name in _of_kind(of_system, systems, SystemKind.STATIC) if systems[name].drafter == drafter]
    ours = _ours(of_system, systems, drafter)
    if not none or not statics or ours is None:
        return None
    odd = {name: _only(of_system[name], odd=True) for name in (*none, *statics)}
    chosen_from = {name: median(values.values()) for name, values in odd.items() if values}
    even = {name: _only(of_system[name], odd=False) for name in (*none, *statics, ours)}
    if not chosen_from or not even[ours]:
        return None
    best = max(chosen_from, key=lambda name: chosen_from[name])
    plain = max(none, key=lambda name: chosen_from.get(name, 0.0))
    ratios = _ratios(even[ours], even[best])
    of_none = _ratios(of_system[ours], of_system[plain])
    if not ratios or not of_none or not even[plain]:
        return None
    middle = {name: median(even[name].values()) for name in (ours, best, plain)}
    return Compared(
        point, drafter, ours, best, middle[ours], middle[best], middle[plain],
        geometric_estimate(ratios), geometric_estimate(of_none), middle[best] / middle[plain],
    )  # fmt: skip


def _of_kind(names: Mapping[str, object], systems: Mapping[str, System], kind: SystemKind) -> list[str]:
    return [name for name in names if systems[name].kind is kind]


def _drafters(names: Mapping[str, object], systems: Mapping[str, System]) -> list[str]:
    return sorted({systems[name].drafter for name in _of_kind(names, systems, SystemKind.STATIC)})


def _ours(names: Mapping[str, object], systems: Mapping[str, System], drafter: str) -> str | None:
    """Ours with this drafter alone where it ran, else ours with a pool that has it."""
    mine = [name for name in _of_kind(names, systems, SystemKind.OURS) if drafter in systems[name].pool]
    return min(mine, key=lambda name: len(systems[name].pool), default=None)


def _only(values: Mapping[int, float], *, odd: bool) -> dict[int, float]:
    return {repeat: value for repeat, value in values.items() if is_odd(repeat) is odd}


def _ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Within a repeat: what the machine did to both cancels."""
    return [ours[repeat] / theirs[repeat] for repeat in sorted(ours.keys() & theirs.keys())]


def _kept(scenario: int, compared: Sequence[Compared]) -> Bar:
    text = "part of the best static setting's gain that ours keeps, where it is 1.15 or more"
    bar = Bar(scenario, text, KEPT_GAIN, at_least=True)
    points = [one for one in compared if one.worthwhile]
    if not points:
        return replace(bar, note="no such point" if compared else "")
    worst = min(points, key=lambda one: one.gain_kept)
    kept = sum(one.gain_kept >= KEPT_GAIN for one in points)
    return judged(
        replace(
            bar,
            ours=worst.ours_tokens_per_s,
            baseline=f"{worst.best} ({worst.point})",
            best_baseline=worst.best_tokens_per_s,
            ratio=worst.gain_kept,
            note=f"the worst of {len(points)} points; {kept} keep enough",
        )
    )


def _of_best(scenario: int, compared: Sequence[Compared]) -> Bar:
    bar = Bar(scenario, "ours by the best static setting, geometric mean over all points", OF_BEST, at_least=True)
    if not compared:
        return bar
    estimate = geometric_estimate([one.of_best.value for one in compared])
    return judged(
        replace(
            bar,
            ours=geometric_mean([one.ours_tokens_per_s for one in compared]),
            baseline="each point's best static setting",
            best_baseline=geometric_mean([one.best_tokens_per_s for one in compared]),
            ratio=estimate.value,
            interval=estimate.interval,
            note=f"{len(compared)} points",
        )
    )


def _worst(scenario: int, compared: Sequence[Compared]) -> Bar:
    bar = Bar(
        scenario, "upper end of the 95% interval of the worst point, ours by best static", NO_POINT_BELOW, at_least=True
    )
    known = [(one.of_best.interval[1], one) for one in compared if one.of_best.interval is not None]
    if not known:
        return bar
    upper, worst = min(known, key=lambda pair: pair[0])
    return judged(
        replace(
            bar,
            ours=worst.ours_tokens_per_s,
            baseline=f"{worst.best} ({worst.point})",
            best_baseline=worst.best_tokens_per_s,
            ratio=upper,
            interval=worst.of_best.interval,
        )
    )


def _none(scenario: int, compared: Sequence[Compared]) -> Bar:
    bar = Bar(scenario, "ours by no speculation at the worst point", OF_NONE, at_least=True)
    if not compared:
        return bar
    worst = min(compared, key=lambda one: one.of_none.value)
    return judged(
        replace(
            bar,
            ours=worst.ours_tokens_per_s,
            baseline=f"no speculation ({worst.point})",
            best_baseline=worst.none_tokens_per_s,
            ratio=worst.of_none.value,
            interval=worst.of_none.interval,
        )
    )
