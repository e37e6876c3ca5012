"""From a scenario to the requests that are sent: pure, so that every system gets the same ones in every repeat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tests.benchmarks.evidence.arrivals import from_trace, poisson
from tests.benchmarks.evidence.prompts import Data
from tests.benchmarks.evidence.scenario import (
    Acceptance,
    Closed,
    ComparedScenario,
    Rates,
    ShiftingData,
    SLOMix,
    Testbed,
    Trace,
)


@dataclass(frozen=True)
class Planned:
    prompt: str
    phase: str
    at_s: float | None = None
    """When it arrives, from the start of its point; None: when a place is free."""
    slo_class: str = ""


@dataclass(frozen=True)
class Point:
    """What is sent in one go to a system at rest."""

    name: str
    requests: tuple[Planned, ...]
    concurrency: int | None = None
    """At most so many at a time; None: each at its time."""
    acceptance: float | None = None
    """Of every proposed token, where it is controlled."""


@dataclass(frozen=True)
class Calibration:
    """Of stock vLLM without speculation on this machine, measured at the start of a run."""

    capacity_per_s: float
    """Requests."""
    step_s_at_batch_8: float
    work_us: float
    """Of the speedometer's fixed work meanwhile: the speed of the machine that both belong to."""


def points(scenario: ComparedScenario, testbed: Testbed, data: Data, stock: Calibration, repeat: int) -> list[Point]:
    """What each system gets in this repeat; the same for all of them."""
    random = Random(f"{scenario.scenario}/{repeat}")  # a string's seed does not depend on the process
    prompts = _Prompts(testbed, data, random)
    match scenario:
        case Closed():
            return [
                Point(point_name(group, slots), prompts.without_times(group, total, group), concurrency=slots)
                for group in scenario.groups
                for slots, total in scenario.concurrency.items()
            ]
        case Acceptance(group=group):
            return [
                Point(point_name(str(rate), slots), prompts.without_times(group, total, group), slots, rate)
                for rate in scenario.acceptance
                for slots, total in scenario.concurrency.items()
            ]
        case Rates():
            return [Point(scenario.title, _rates(scenario, prompts, stock, random))]
        case ShiftingData():
            phases = [prompts.without_times(one.group, one.requests, one.name) for one in scenario.phases]
            return [Point(scenario.title, tuple(itertools.chain(*phases)), concurrency=scenario.concurrency)]
        case Trace():
            rate = scenario.of_capacity * stock.capacity_per_s
            times = from_trace(data.gaps_s, rate, scenario.seconds, scenario.longest_gap_s)
            return [Point(scenario.title, prompts.at_times(scenario.group, times, scenario.title))]
        case SLOMix():
            return [_slo_point(scenario, load, prompts, stock, random) for load in scenario.loads]


def point_name(group: str, concurrency: int) -> str:
    return f"{group} at {concurrency}"


def load_name(of_capacity: float) -> str:
    return f"{of_capacity:g} of capacity"


def _rates(scenario: Rates, prompts: _Prompts, stock: Calibration, random: Random) -> tuple[Planned, ...]:
    requests: list[Planned] = []
    start = 0.0
    for phase in scenario.phases:
        times = poisson(phase.of_capacity * stock.capacity_per_s, phase.seconds, random)
        requests += prompts.at_times(scenario.group, [start + time for time in times], phase.name)
        start += phase.seconds
    return tuple(requests)


def _slo_point(scenario: SLOMix, load: float, prompts: _Prompts, stock: Calibration, random: Random) -> Point:
    times = poisson(load * stock.capacity_per_s, scenario.seconds, random)
    names = [one.name for one in scenario.classes]
    drawn = random.choices(names, weights=[one.share for one in scenario.classes], k=len(times))
    return Point(load_name(load), prompts.at_times(scenario.group, times, load_name(load), drawn))


class _Prompts:
    """Deals each group's prompts in a fixed random order, over and over."""

    def __init__(self, testbed: Testbed, data: Data, random: Random) -> None:
        self._testbed, self._data, self._random = testbed, data, random
        self._decks: dict[str, Iterator[str]] = {}

    def without_times(self, group: str, count: int, phase: str) -> tuple[Planned, ...]:
        return tuple(Planned(self._next(group), phase) for _ in range(count))

    def at_times(
        self, group: str, times: Sequence[float], phase: str, classes: Sequence[str] = ()
    ) -> tuple[Planned, ...]:
        named = classes or [""] * len(times)
        return tuple(
            Planned(self._next(group), phase, at_s=time, slo_class=slo_class)
            for time, slo_class in zip(times, named, strict=True)
        )

    def _next(self, group: str) -> str:
        if group not in self._decks:
            deck = list(self._data.of(self._testbed.categories(group)))
            self._random.shuffle(deck)
            self._decks[group] = itertools.cycle(deck)
        return next(self._decks[group])
