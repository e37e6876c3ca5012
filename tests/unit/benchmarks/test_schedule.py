"""Which system runs when."""

from __future__ import annotations

import pytest

from tests.benchmarks.evidence.scenario import ComparedScenario, Cost, Size, load_scenarios, load_testbed
from tests.benchmarks.evidence.schedule import MOST_SERVERS, REPEATS_TOGETHER, Round, Sitting, left, sittings

ORDER = [system.name for system in load_testbed().systems]
REFERENCES = load_testbed().references


def compared(size: Size = Size.DEFAULT) -> list[ComparedScenario]:
    return [one for one in load_scenarios(size) if not isinstance(one, Cost)]


def planned(size: Size = Size.DEFAULT) -> list[Sitting]:
    return list(sittings(compared(size), ORDER, REFERENCES))


def rounds(planned: list[Sitting]) -> list[Round]:
    return [one for sitting in planned for one in sitting.rounds]


def test_each_system_runs_each_repeat_of_each_scenario() -> None:
    """Once, but for the reference, which is beside each of the others."""
    for size in Size:
        ran = [(one.scenario.scenario, one.repeat, name) for one in rounds(planned(size)) for name in one.systems]
        wanted = {
            (one.scenario, repeat, system)
            for one in compared(size)
            for repeat in range(1, one.repeats + 1)
            for system in one.systems
        }
        once = [one for one in ran if one[2] not in REFERENCES]
        assert len(once) == len(set(once))
        assert set(ran) == wanted


def test_whoever_is_measured_is_measured_beside_the_reference() -> None:
    for one in rounds(planned()):
        assert set(REFERENCES) & set(one.systems), one
        assert len(one.systems) > 1, f"the reference alone in scenario {one.scenario.scenario}: nobody to compare with"


def test_runs_of_one_repeat_have_names_of_their_own() -> None:
    names = [
        (one.scenario.scenario, one.repeat, one.sitting, name) for one in rounds(planned()) for name in one.systems
    ]
    assert len(names) == len(set(names))


def test_few_systems_are_started_once() -> None:
    """The quick size: one start of each, and one more where acceptance is controlled, as that is another engine."""
    assert [sitting.controlled for sitting in planned(Size.QUICK)] == [False, True]


@pytest.mark.parametrize("size", [Size.DEFAULT, Size.FULL])
def test_no_more_servers_are_up_than_memory_holds(size: Size) -> None:
    """Others take turns group by group, a few repeats at a time."""
    every = planned(size)
    assert all(1 < len(sitting.systems) <= MOST_SERVERS for sitting in every)
    repeats = [one.repeat for one in rounds([sitting for sitting in every if not sitting.controlled])]
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
    remaining = left(planned(), lambda one, system: (one.repeat, system) != (2, "eagle-k1"))
    assert {(one.repeat, one.systems) for one in rounds(remaining)} == {(2, ("eagle-k1",))}
    assert {sitting.systems for sitting in remaining} == {("eagle-k1",)}
    assert not left(planned(), lambda *_: True)
