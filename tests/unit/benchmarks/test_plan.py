"""What is sent when: the same to every system, and at the rate that the scenario says."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.evidence.arrivals import from_trace, poisson
from tests.benchmarks.evidence.plan import Calibration, points
from tests.benchmarks.evidence.prompts import load_data
from tests.benchmarks.evidence.scenario import (
    ComparedScenario,
    Cost,
    Rates,
    ShiftingData,
    Size,
    SLOMix,
    load_scenarios,
    load_testbed,
)

STOCK = Calibration(capacity_per_s=10.0, step_s_at_batch_8=0.03, work_us=100.0)
COMPARED = [one for one in load_scenarios(Size.DEFAULT) if not isinstance(one, Cost)]
DATA = load_data()


@pytest.mark.parametrize("scenario", COMPARED, ids=lambda one: one.title)
def test_every_system_gets_the_same_requests_and_every_repeat_others(scenario: ComparedScenario) -> None:
    testbed = load_testbed()
    first, again, other = (points(scenario, testbed, DATA, STOCK, repeat) for repeat in (1, 1, 2))
    assert first == again
    assert [point.name for point in first] == [point.name for point in other]
    assert first != other
    assert all(point.requests for point in first)


def test_phases_of_load_follow_each_other() -> None:
    scenario = next(one for one in COMPARED if isinstance(one, Rates))
    (point,) = points(scenario, load_testbed(), DATA, STOCK, 1)
    times = [one.at_s for one in point.requests if one.at_s is not None]
    assert times == sorted(times)
    start = 0.0
    for phase in scenario.phases:
        mine = [one.at_s for one in point.requests if one.phase == phase.name]
        assert all(one is not None and start <= one < start + phase.seconds for one in mine)
        start += phase.seconds


def test_shifting_data_keeps_its_order_and_its_concurrency() -> None:
    scenario = next(one for one in COMPARED if isinstance(one, ShiftingData))
    (point,) = points(scenario, load_testbed(), DATA, STOCK, 1)
    assert point.concurrency == scenario.concurrency
    assert [one.phase for one in point.requests] == [
        phase.name for phase in scenario.phases for _ in range(phase.requests)
    ]


def test_slo_classes_come_in_their_shares() -> None:
    scenario = next(one for one in COMPARED if isinstance(one, SLOMix))
    many = scenario.model_copy(update={"seconds": 200.0, "loads": (1.0,)})
    (point,) = points(many, load_testbed(), DATA, STOCK, 1)
    for one in scenario.classes:
        share = sum(request.slo_class == one.name for request in point.requests) / len(point.requests)
        assert share == pytest.approx(one.share, abs=0.05)


@given(st.floats(0.5, 20), st.integers(0, 5))
def test_poisson_arrivals_have_their_rate(rate: float, seed: int) -> None:
    times = poisson(rate, 1000 / rate, Random(seed))
    assert times == sorted(times)
    assert 850 <= len(times) <= 1150


@given(st.lists(st.floats(0.001, 5), min_size=50, max_size=80), st.floats(0.5, 2))
def test_a_trace_keeps_the_pattern_of_its_gaps(gaps: list[float], rate: float) -> None:
    times = from_trace(gaps, rate, seconds=20, longest_gap_s=1e9)
    used = round(rate * 20)
    assert len(times) == used
    scale = 20 / sum(gaps[:used])
    assert times[0] == pytest.approx(gaps[0] * scale)
    for earlier, later, gap in zip(times, times[1:], gaps[1:], strict=False):
        assert later - earlier == pytest.approx(gap * scale, abs=1e-9)


@given(st.lists(st.floats(0.001, 50), min_size=40, max_size=40), st.floats(0.6, 5))
def test_a_pause_of_the_trace_is_cut_and_the_rate_holds(gaps: list[float], longest: float) -> None:
    times = from_trace(gaps, 2, seconds=20, longest_gap_s=longest)
    assert len(times) == 40
    assert times[-1] == pytest.approx(20)
    assert max(np.diff([0, *times])) <= longest * 1.001


def test_a_rate_that_needs_longer_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="raise longest_gap_s"):
        from_trace([1, 1, 97, 1], 0.04, seconds=100, longest_gap_s=10)


def test_a_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="2 gaps; 100 requests"):
        from_trace([1, 1], 10, seconds=10, longest_gap_s=1)
