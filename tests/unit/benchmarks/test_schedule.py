"""Which system runs when."""

from __future__ import annotations

import pytest

from tests.benchmarks.evidence.scenario import ComparedScenario, Cost, Size, load_scenarios, load_testbed
from tests.benchmarks.evidence.schedule import MOST_SERVERS, REPEATS_TOGETHER, Round, Sitting, sittings

ORDER = [system.name for system in load_testbed().systems]


def compared(size: Size = Size.DEFAULT) -> list[ComparedScenario]:
    return [one for one in load_scenarios(size) if not isinstance(one, Cost)]


def planned(size: Size = Size.DEFAULT) -> list[Sitting]:
    return list(sittings(compared(size), ORDER, lambda *_: False))


def rounds(planned: list[Sitting]) -> list[Round]:
    return [one for sitting in planned for one in sitting.rounds]


def test_each_system_runs_each_repeat_of_each_scenario_once() -> None:
    for size in Size:
        ran = [(one.scenario.scenario, one.repeat, name) for one in rounds(planned(size)) for name in one.systems]
        wanted = {
            (one.scenario, repeat, system)
            for one in compared(size)
            for repeat in range(1, one.repeats + 1)
            for system in one.systems
        }
        assert len(ran) == len(set(ran))
        assert set(ran) == wanted


def test_few_systems_are_started_once() -> None:
    """The quick size: one start of each, and one more where acceptance is controlled, as that is another engine."""
    assert [sitting.controlled for sitting in planned(Size.QUICK)] == [False, True]


@pytest.mark.parametrize("size", [Size.DEFAULT, Size.FULL])
def test_no_more_servers_are_up_than_memory_holds(size: Size) -> None:
    """Others take turns group by group, a few repeats at a time."""
    left = planned(size)
    assert all(1 < len(sitting.systems) <= MOST_SERVERS for sitting in left)
    repeats = [one.repeat for one in rounds([sitting for sitting in left if not sitting.controlled])]
    turns = [(repeat - 1) // REPEATS_TOGETHER for repeat in repeats]
    assert turns == sorted(turns)


def test_ours_meets_other_baselines_later_on() -> None:
    full = [sitting for sitting in planned(Size.FULL) if not sitting.controlled]
    met = [set(sitting.systems) for sitting in full if "ours" in sitting.systems]
    assert len(met) > 1
    assert met[0] != met[1]


def test_whoever_runs_is_up() -> None:
    for sitting in planned(Size.FULL):
        assert {name for one in sitting.rounds for name in one.systems} <= set(sitting.systems)


def test_everybody_has_a_turn_at_every_point_and_nobody_is_always_first() -> None:
    one = Round(1, compared()[0], ("a", "b", "c"))
    turns = [one.turns(point) for point in range(6)]
    assert all(sorted(names) == ["a", "b", "c"] for names in turns)
    assert {names[0] for names in turns} == {"a", "b", "c"}
    after_a = {names[names.index("a") + 1] for names in turns if names[-1] != "a"}
    assert after_a == {"b", "c"}


def test_what_is_finished_is_not_run_again() -> None:
    left = list(sittings(compared(), ORDER, lambda _scenario, repeat, system: (repeat, system) != (2, "ours")))
    assert {(one.repeat, one.systems) for one in rounds(left)} == {(2, ("ours",))}
    assert [sitting.systems for sitting in left] == [("ours",)]
    assert not list(sittings(compared(), ORDER, lambda *_: True))
