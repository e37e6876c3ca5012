"""Which system runs when."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.evidence.scenario import ComparedScenario, Cost, Size, load_scenarios, load_testbed
from tests.benchmarks.evidence.schedule import Sitting, sittings

COMPARED = [one for one in load_scenarios(Size.DEFAULT) if not isinstance(one, Cost)]
ORDER = [system.name for system in load_testbed().systems]


def nothing_finished(_scenario: ComparedScenario, _repeat: int, _system: str) -> bool:
    return False


def planned() -> list[Sitting]:
    return list(sittings(COMPARED, ORDER, nothing_finished))


def test_each_system_runs_each_repeat_of_each_scenario_once() -> None:
    ran = [(one.scenario, sitting.repeat, sitting.system) for sitting in planned() for one in sitting.scenarios]
    wanted = {
        (one.scenario, repeat, system)
        for one in COMPARED
        for repeat in range(1, one.repeats + 1)
        for system in one.systems
    }
    assert len(ran) == len(set(ran))
    assert set(ran) == wanted


def test_a_repeat_is_over_before_the_next_begins() -> None:
    repeats = [sitting.repeat for sitting in planned()]
    assert repeats == sorted(repeats)


def test_repeats_begin_with_different_systems() -> None:
    firsts: dict[Any, Any] = {}
    for sitting in planned():
        firsts.setdefault(sitting.repeat, sitting.system)
    assert len(set(firsts.values())) > 1


def test_one_start_serves_every_scenario_of_its_system() -> None:
    starts = [(sitting.repeat, sitting.system, sitting.controlled) for sitting in planned()]
    assert len(starts) == len(set(starts))


def test_what_is_finished_is_not_run_again() -> None:
    left = list(sittings(COMPARED, ORDER, lambda _scenario, repeat, system: (repeat, system) != (2, "ours")))
    assert [(sitting.repeat, sitting.system) for sitting in left] == [(2, "ours")]
    assert not list(sittings(COMPARED, ORDER, lambda *_: True))
