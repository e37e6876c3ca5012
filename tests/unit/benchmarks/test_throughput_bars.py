"""Bars 1 and 2, on runs of known speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.benchmarks.analysis import throughput
from tests.benchmarks.analysis.bar import Bar
from tests.unit.benchmarks.runs import SYSTEMS, speed_runs


def bars_of(speeds: dict[str, dict[str, list[float]]]) -> dict[float, Bar]:
    """By bound."""
    compared = throughput.compare(speed_runs(speeds), SYSTEMS)
    return {bar.bound: bar for bar in throughput.bars(1, compared)}


def test_ours_that_keeps_the_gain_meets_every_bar() -> None:
    found = bars_of({"a": {"none": [100] * 4, "eagle-k1": [130] * 4, "eagle-k3": [90] * 4, "ours": [128] * 4}})
    assert all(bar.met for bar in found.values())
    assert found[throughput.KEPT_GAIN].ratio == pytest.approx(28 / 30)
    assert found[throughput.OF_BEST].ratio == pytest.approx(128 / 130)
    assert found[throughput.OF_NONE].ratio == pytest.approx(1.28)


def test_the_best_setting_is_not_the_one_that_was_lucky_on_even_repeats() -> None:
    """Chosen on odd repeats: eagle-k1, although eagle-k3 had a lucky even one."""
    speeds = {"none": [100] * 4, "eagle-k1": [130] * 4, "eagle-k3": [120, 200, 120, 200], "ours": [130] * 4}
    (one,) = throughput.compare(speed_runs({"a": speeds}), SYSTEMS)
    assert one.best == "eagle-k1"
    assert one.of_best.value == pytest.approx(1.0)


def test_no_speculation_is_a_setting_too() -> None:
    (one,) = throughput.compare(speed_runs({"a": {"none": [100] * 2, "eagle-k3": [70] * 2, "ours": [95] * 2}}), SYSTEMS)
    assert one.best == "none"
    assert one.of_best.value == pytest.approx(0.95)
    assert not one.worthwhile


def test_a_slow_hour_of_the_machine_cancels_within_a_repeat() -> None:
    speeds = {"none": [100, 50, 100, 50], "eagle-k1": [130, 65, 130, 65], "ours": [130, 65, 130, 65]}
    (one,) = throughput.compare(speed_runs({"a": speeds}), SYSTEMS)
    assert one.of_best.value == pytest.approx(1.0)
    assert one.of_none.value == pytest.approx(1.3)


def test_a_slow_hour_between_two_sittings_cancels_through_the_reference() -> None:
    """eagle-k1 was measured when the machine was half as fast, and so was ours beside it."""
    runs = speed_runs({"a": {"none": [100] * 2, "ours": [130] * 2}})
    runs += [replace(one, sitting=1) for one in speed_runs({"a": {"eagle-k1": [65] * 2, "ours": [65] * 2}})]
    (one,) = throughput.compare(runs, SYSTEMS)
    assert one.best == "eagle-k1"
    assert one.of_best.value == pytest.approx(1.0)
    assert one.of_none.value == pytest.approx(1.3)
    assert one.best_of_none == pytest.approx(1.3)


def test_a_point_wholly_below_the_bound_is_a_miss_and_is_named() -> None:
    good = {"none": [100.0] * 4, "eagle-k1": [110.0] * 4, "ours": [111.0] * 4}
    bad = {"none": [100.0] * 4, "eagle-k1": [110.0] * 4, "ours": [99.0, 99.0, 99.0, 100.0]}
    found = bars_of({"good": good, "bad": bad})
    worst = found[throughput.NO_POINT_BELOW]
    assert worst.met is False
    assert worst.baseline == "eagle-k1 (bad)"
    assert found[throughput.OF_NONE].met


def test_losing_to_no_speculation_at_one_point_misses_whatever_the_mean_is() -> None:
    fast = {"none": [100.0] * 2, "eagle-k1": [150.0] * 2, "ours": [180.0] * 2}
    slow = {"none": [100.0] * 2, "eagle-k1": [80.0] * 2, "ours": [97.0] * 2}
    found = bars_of({"fast": fast, "slow": slow})
    assert found[throughput.OF_BEST].met
    assert found[throughput.OF_NONE].met is False
    assert found[throughput.OF_NONE].baseline == "no speculation (slow)"


def test_one_repeat_judges_nothing() -> None:
    found = bars_of({"a": {"none": [100], "eagle-k1": [130], "ours": [128]}})
    assert all(bar.met is None for bar in found.values())


def test_a_drafter_is_compared_with_ours_of_that_pool_where_it_ran() -> None:
    speeds = {
        "none": [100] * 2, "eagle-k1": [130] * 2, "lookup-k3": [90] * 2, "ours": [120] * 2, "ours-eagle": [131] * 2,
    }  # fmt: skip
    found = {one.drafter: one.ours for one in throughput.compare(speed_runs({"a": speeds}), SYSTEMS)}
    assert found == {"eagle": "ours-eagle", "lookup": "ours"}


def test_the_table_is_no_static_setting() -> None:
    speeds = {"none": [100] * 2, "eagle-k1": [110] * 2, "eagle-table": [500] * 2, "ours": [110] * 2}
    (one,) = throughput.compare(speed_runs({"a": speeds}), SYSTEMS)
    assert one.best == "eagle-k1"


@pytest.mark.parametrize(("lookup", "met"), [(120.0, True), (110.0, False)])
def test_two_drafters_must_gain_somewhere(lookup: float, met: bool) -> None:
    speeds: dict[str, Sequence[float]] = {
        "none": [100] * 2, "eagle-k1": [130] * 2, "lookup-k3": [lookup] * 2, "ours": [130] * 2,
    }  # fmt: skip
    assert throughput.drafters_bar(throughput.compare(speed_runs({"a": speeds}), SYSTEMS)).met is met
