"""Means and intervals that the bars are judged by."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.analysis.statistics import bootstrap, geometric_estimate, geometric_mean

RATIOS = st.lists(st.floats(0.1, 10), min_size=1, max_size=20)


def test_a_gain_and_the_loss_that_undoes_it_make_one() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        geometric_mean([])


@given(RATIOS, st.floats(0.1, 10))
def test_a_faster_machine_moves_the_mean_by_its_factor(ratios: list[float], factor: float) -> None:
    assert geometric_mean([factor * one for one in ratios]) == pytest.approx(factor * geometric_mean(ratios))


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=20))
def test_the_interval_lies_within_what_was_seen(ratios: list[float]) -> None:
    interval = geometric_estimate(ratios).interval
    assert interval is not None
    low, high = interval
    assert min(ratios) * (1 - 1e-9) <= low <= high <= max(ratios) * (1 + 1e-9)


def test_one_observation_has_no_interval() -> None:
    assert geometric_estimate([1.2]).interval is None


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        interval = bootstrap(rng.normal(3.0, 1.0, 40), lambda rows: rows.mean(axis=1), seed=trial)
        assert interval is not None
        covered += interval[0] <= 3.0 <= interval[1]
    assert 0.88 <= covered / 200 <= 0.99


def test_more_observations_narrow_the_interval() -> None:
    rng = np.random.default_rng(1)

    def width(count: int) -> float:
        interval = bootstrap(rng.normal(0, 1, count), lambda rows: rows.mean(axis=1))
        assert interval is not None
        return interval[1] - interval[0]

    assert width(400) < width(25)
    assert not math.isnan(width(25))
