"""Bar 6, on runs of known time between tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.benchmarks.analysis import attainment
from tests.benchmarks.evidence.raw import Run
from tests.unit.benchmarks.runs import SYSTEMS, outcome, run

LIMITS = {"tight": 0.01, "loose": 0.08}
REQUESTS = 20


def runs_of(met: Mapping[str, Sequence[int]], repeats: int = 2) -> list[Run]:
    """From system -> how many of 20 tight requests meet their SLO at loads "0", "1", ..."""
    return [
        run(
            system, repeat,
            {
                str(load): [
                    outcome(slo_class="tight", tpot_s=0.009 if index < count else 0.02) for index in range(REQUESTS)
                ]
                for load, count in enumerate(counts)
            },
        )
        for system, counts in met.items()
        for repeat in range(1, repeats + 1)
    ]  # fmt: skip


def test_fewer_misses_where_stock_falls_meet_the_bars() -> None:
    runs = runs_of({"none": [20, 10], "eagle-k3": [18, 5], "ours": [20, 15]})
    everywhere, misses = attainment.bars(6, runs, SYSTEMS, LIMITS)
    assert everywhere.met
    assert misses.met
    assert misses.ratio == pytest.approx(0.5)
    assert misses.baseline == "none (1)"


def test_a_clear_loss_at_one_load_is_a_miss_and_is_named() -> None:
    runs = runs_of({"none": [20, 10], "eagle-k3": [20, 10], "ours": [8, 20]})
    everywhere, _ = attainment.bars(6, runs, SYSTEMS, LIMITS)
    assert everywhere.met is False
    assert everywhere.baseline.endswith("(0)")
    assert everywhere.ours == pytest.approx(0.4)


def test_a_loss_within_noise_is_none() -> None:
    runs = runs_of({"none": [20, 10], "ours": [19, 14]}, repeats=1)
    everywhere, _ = attainment.bars(6, runs, SYSTEMS, LIMITS)
    assert everywhere.met


def test_ours_is_compared_with_what_it_did_beside_the_other() -> None:
    runs = runs_of({"none": [10], "ours": [15]})
    runs += [replace(one, sitting=1) for one in runs_of({"eagle-k3": [2], "ours": [2]})]
    everywhere, misses = attainment.bars(6, runs, SYSTEMS, LIMITS)
    assert everywhere.met
    assert misses.baseline == "none (0)"
    assert misses.ratio == pytest.approx(0.5)


def test_where_stock_always_attains_there_is_nothing_to_judge() -> None:
    _, misses = attainment.bars(6, runs_of({"none": [20, 19], "ours": [20, 20]}), SYSTEMS, LIMITS)
    assert misses.met is None
    assert "70%" in misses.note


def test_each_class_has_its_own_limit() -> None:
    outcomes = [outcome(slo_class="tight", tpot_s=0.05), outcome(slo_class="loose", tpot_s=0.05)]
    (found,) = attainment.attained([run("none", 1, {"0": outcomes}, seconds=2.0)], LIMITS)
    assert found.per_class == {"loose": 1.0, "tight": 0.0}
    assert found.attainment == pytest.approx(0.5)
    assert found.request_goodput == pytest.approx(0.5)
