"""A user is told how long it takes, and the default run keeps its promise."""

from __future__ import annotations

from tests.benchmarks.evidence.budget import seconds_left
from tests.benchmarks.evidence.prompts import load_data
from tests.benchmarks.evidence.scenario import Cost, Size, load_scenarios, load_testbed
from tests.benchmarks.evidence.schedule import Sitting, sittings

STAND_ALONE_S = 450.0
"""The benchmarks that have no scenario, but the operator's: about seven minutes."""


def left(size: Size) -> list[Sitting]:
    compared = [one for one in load_scenarios(size) if not isinstance(one, Cost)]
    testbed = load_testbed()
    return list(sittings(compared, [system.name for system in testbed.systems], testbed.references))


def test_the_default_run_is_planned_for_under_ninety_minutes() -> None:
    assert seconds_left(left(Size.DEFAULT), load_testbed(), load_data()) + STAND_ALONE_S < 90 * 60


def test_sizes_cost_what_their_names_say() -> None:
    quick, default, full = (seconds_left(left(size), load_testbed(), load_data()) for size in Size)
    assert quick < default / 4
    assert default < full


def test_nothing_left_takes_no_time() -> None:
    assert seconds_left([], load_testbed(), load_data()) == 0.0
