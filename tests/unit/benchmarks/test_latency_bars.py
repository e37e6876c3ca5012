"""Bars 3 to 5, on runs of known latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.benchmarks.analysis import latency
from tests.benchmarks.evidence.load import Outcome
from tests.benchmarks.evidence.raw import Run
from tests.unit.benchmarks.runs import SYSTEMS, outcome, run


def runs_of(seconds: Mapping[str, Mapping[str, float]], repeats: Sequence[int] = (1, 2)) -> list[Run]:
    """From system -> phase -> latency of its five requests."""
    return [
        run(
            system,
            repeat,
            {"all": [outcome(value, phase=phase) for phase, value in of_phase.items() for _ in range(5)]},
        )
        for system, of_phase in seconds.items()
        for repeat in repeats
    ]


def test_ours_that_follows_every_phase_beats_every_single_setting() -> None:
    runs = runs_of(
        {"none": {"low": 1.5, "high": 2.0}, "eagle-k3": {"low": 1.0, "high": 4.0}, "ours": {"low": 1.0, "high": 2.0}}
    )
    by_phase, whole = latency.bars(3, latency.compare(runs, SYSTEMS))
    assert by_phase.met
    assert by_phase.ratio == pytest.approx(1.0)
    assert whole.met
    assert whole.baseline == "none (the whole run)"
    assert whole.ratio == pytest.approx((1.0 * 2.0 / (1.5 * 2.0)) ** 0.5)


def test_one_slow_phase_is_a_miss_and_is_named() -> None:
    runs = runs_of({"none": {"low": 1.0, "high": 2.0}, "ours": {"low": 1.1, "high": 1.0}})
    by_phase, whole = latency.bars(3, latency.compare(runs, SYSTEMS))
    assert by_phase.met is False
    assert by_phase.baseline == "none (low)"
    assert whole.met


def test_each_phase_has_its_own_best_setting() -> None:
    runs = runs_of(
        {"none": {"low": 1.5, "high": 2.0}, "eagle-k3": {"low": 1.0, "high": 4.0}, "ours": {"low": 1.2, "high": 2.0}}
    )
    found = {one.phase: one.best for one in latency.compare(runs, SYSTEMS)}
    assert found == {"low": "eagle-k3", "high": "none", latency.WHOLE: "none"}


def test_ratios_are_taken_request_by_request() -> None:
    """A long request weighs no more than a short one."""
    ours = run("ours", 2, {"all": [outcome(1.0), outcome(100.0)]})
    odd = [run(name, 1, {"all": [outcome(1.0), outcome(100.0)]}) for name in ("ours", "none")]
    none = run("none", 2, {"all": [outcome(2.0), outcome(50.0)]})
    found = latency.compare([*odd, ours, none], SYSTEMS)
    assert found[0].ratio.value == pytest.approx(1.0)


def test_ours_is_compared_with_what_it_did_beside_the_other() -> None:
    """eagle-k3 had a slow half-hour, and ours beside it, too: it is the best setting all the same."""
    runs = runs_of({"none": {"low": 1.2}, "ours": {"low": 1.0}})
    runs += [replace(one, sitting=1) for one in runs_of({"eagle-k3": {"low": 2.2}, "ours": {"low": 2.0}})]
    found = latency.compare(runs, SYSTEMS)[0]
    assert found.best == "eagle-k3"
    assert found.ratio.value == pytest.approx(2.0 / 2.2)
    assert found.ours_s == pytest.approx(2.0)


def test_without_an_even_repeat_nothing_is_judged() -> None:
    runs = runs_of({"none": {"low": 1.0}, "ours": {"low": 1.0}}, repeats=(1,))
    assert [bar.met for bar in latency.bars(3, latency.compare(runs, SYSTEMS))] == [None, None]


def test_whoever_switches_to_each_phases_best_setting_is_told() -> None:
    runs = runs_of(
        {"none": {"low": 2.0, "high": 2.0}, "eagle-k3": {"low": 1.0, "high": 8.0}, "ours": {"low": 3.0, "high": 3.0}}
    )
    switched = latency.switching(runs, SYSTEMS)
    assert switched == pytest.approx((1.0 * 2.0 / (2.0 * 2.0)) ** 0.5)
    whole = latency.bars(3, latency.compare(runs, SYSTEMS), switched)[1]
    assert whole.note.endswith("0.71")


def test_a_phase_of_many_requests_weighs_more_in_switching() -> None:
    def requests(low: float, high: float) -> dict[str, list[Outcome]]:
        return {"all": [outcome(low, phase="low"), *(outcome(high, phase="high") for _ in range(3))]}

    seconds = {"none": (2.0, 2.0), "eagle-k3": (1.0, 8.0), "ours": (3.0, 3.0)}
    runs = [run(name, repeat, requests(*each)) for name, each in seconds.items() for repeat in (1, 2)]
    assert latency.switching(runs, SYSTEMS) == pytest.approx(0.5**0.25)


def test_one_phase_leaves_nothing_to_switch() -> None:
    runs = runs_of({"none": {"low": 1.0}, "ours": {"low": 1.0}})
    assert latency.switching(runs, SYSTEMS) is None
    assert latency.switching(runs_of({"none": {"low": 1.0, "high": 1.0}}), SYSTEMS) is None
