"""The machine's speed while something is measured on it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.evidence.speedometer import FEWEST, Speedometer
from tests.unit.benchmarks.runs import outcome, run


def test_it_reads_every_core_while_it_is_open(tmp_path: Path) -> None:
    file = tmp_path / "speed.txt"
    with Speedometer(file) as speedometer:
        mark = speedometer.mark()
        while speedometer.work_us_since(mark) is None:
            time.sleep(0.05)
        found = speedometer.work_us_since(mark)
        assert found is not None
        assert found > 1
    ended = file.stat().st_size
    time.sleep(0.1)
    assert file.stat().st_size == ended


def test_few_readings_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "speed.txt"
    speedometer = Speedometer(file)
    file.write_text("100.0\n" * (FEWEST - 1))
    assert speedometer.work_us_since(0) is None
    file.write_text("100.0\n" * FEWEST + "9")
    assert speedometer.work_us_since(0) == pytest.approx(100.0), "the last one is half written"
    assert speedometer.work_us_since(speedometer.mark()) is None


def test_times_are_brought_to_the_usual_speed() -> None:
    """The machine took twice as long for everything."""
    slow = run("ours", 1, {"a": [outcome(4.0, tpot_s=0.1)]}, seconds=2.0)
    slow = replace(slow, points=tuple(replace(point, slowness=2.0) for point in slow.points))
    (point,) = slow.at_usual_speed().points
    assert point.seconds == pytest.approx(1.0)
    assert point.outcomes[0].latency_s == pytest.approx(2.0)
    assert point.outcomes[0].tpot_s == pytest.approx(0.05)
    assert point.tokens_per_s == pytest.approx(11.0)
    assert slow.at_usual_speed().at_usual_speed() == slow.at_usual_speed()
