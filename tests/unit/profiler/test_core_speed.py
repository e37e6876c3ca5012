"""Steps of different spells of a machine are brought to one speed."""

from __future__ import annotations

import os

import pytest
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import Shape
from outrider_runtime.profiler import core_speed
from outrider_runtime.profiler.core_speed import CoreSpeed
from outrider_runtime.profiler.step_samples import MeasuredStep


def test_fixed_work_takes_time():
    assert core_speed.work_us() > 1


def test_core_that_takes_twice_as_long_has_half_speed(monkeypatch):
    monkeypatch.setattr(core_speed, "work_us", lambda: 100.0)
    speed = CoreSpeed()
    assert speed.current() == pytest.approx(1.0)
    monkeypatch.setattr(core_speed, "work_us", lambda: 200.0)
    assert speed.current() == pytest.approx(0.5)


def test_reading_restores_the_threads_cpu_affinity(monkeypatch):
    mine, read = os.sched_getaffinity(0), []

    def work_us() -> float:
        read.append(os.sched_getaffinity(0))
        return 100.0

    monkeypatch.setattr(core_speed, "work_us", work_us)
    CoreSpeed()
    expected = sorted(mine)[: core_speed.MAX_CORES]
    assert read[: len(expected)] == [{core} for core in expected]
    assert os.sched_getaffinity(0) == mine


def test_step_on_a_slow_core_is_scaled_to_full_speed():
    sample = MeasuredStep(Shape(0, 4, 4), ExecutionMode.UNIFORM, 0.05, 1, draft_s={"eagle": 0.01})
    usual = sample.scale_to_full_speed(0.6)
    assert usual.target_s == pytest.approx(0.03)
    assert usual.draft_s["eagle"] == pytest.approx(0.006)
    assert usual.shape == sample.shape
