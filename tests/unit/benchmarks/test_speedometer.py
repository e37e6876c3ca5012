"""The machine's speed while something is measured on it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.benchmarks.evidence.speedometer import FEWEST, Speedometer


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
