"""A run over many systems: with servers that answer at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.benchmarks.evidence import campaign as module
from tests.benchmarks.evidence.campaign import ATTEMPTS, Campaign
from tests.benchmarks.evidence.load import Outcome, Sent
from tests.benchmarks.evidence.plan import Calibration, Point
from tests.benchmarks.evidence.prompts import load_data
from tests.benchmarks.evidence.scenario import Closed, Size, System, load_testbed
from tests.benchmarks.evidence.server import ServerError
from tests.benchmarks.evidence.start import Starter

SCENARIO = Closed(
    kind="closed", scenario=1, title="Static load", repeats=2, systems=("none", "ours"), groups=("high",),
    concurrency={1: 2, 4: 4},
)  # fmt: skip


class FakeServer:
    base_url = "http://nowhere"

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def pause(self) -> None:
        pass

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield

    def state(self) -> None:
        return None

    def check_alive(self) -> None:
        pass

    def memory_mb(self) -> float:
        return 1000.0

    def cpu_s(self) -> float:
        return 0.0


class FakeSpeedometer:
    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __enter__(self) -> FakeSpeedometer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def mark(self) -> int:
        return 0

    def work_us_since(self, _mark: int) -> float | None:
        return self._rig.work_us


class Rig:
    """What the fake machine did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts: list[str] = []
        self.sent: list[str] = []
        self.broken: set[str] = set()
        self.others_cores: Iterator[float] | None = None
        self.work_us: float | None = 100.0

    def campaign(self) -> Campaign:
        return Campaign(load_testbed(), (SCENARIO,), load_data(), Size.DEFAULT, lambda _text: None, self.folder)

    def calibrate(self) -> None:
        calibration = Calibration(capacity_per_s=4.0, step_s_at_batch_8=0.05, work_us=100.0)
        (self.folder / self.campaign().version / "calibration.json").write_text(json.dumps(asdict(calibration)))

    def start(self, _starter: Starter, system: System, *_: object, **__: object) -> FakeServer:
        if system.name in self.broken:
            raise ServerError("no memory")
        self.starts.append(system.name)
        return FakeServer()

    def send(self, point: Point, *_: object) -> Sent:
        self.sent.append(point.name)
        outcomes = tuple(Outcome(one.phase, one.slo_class, 1.0, 0.1, 64) for one in point.requests)
        return Sent(1.0, outcomes, None)

    def others_cpu_s(self, _server: object) -> float:
        self.clock += 0.0 if self.others_cores is None else next(self.others_cores)
        return self.clock

    clock = 0.0


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    monkeypatch.setattr(Starter, "start", lambda starter, *args, **kwargs: rig.start(starter, *args, **kwargs))
    monkeypatch.setattr(Starter, "prepare", lambda *_: None)
    monkeypatch.setattr(module, "Speedometer", lambda _file: FakeSpeedometer(rig))
    monkeypatch.setattr(module, "send", rig.send)
    monkeypatch.setattr(module, "_others_cpu_s", rig.others_cpu_s)
    (tmp_path / rig.campaign().version).mkdir()
    return rig


def test_a_run_that_was_cut_off_goes_on_where_it_stopped(rig: Rig) -> None:
    rig.broken = {"ours"}
    rig.campaign().run()
    assert rig.campaign().missing() == ["scenario 1: ours, repeat 1", "scenario 1: ours, repeat 2"]
    rig.broken, rig.starts = set(), []
    rig.campaign().run()
    assert rig.starts == ["ours"]
    assert not rig.campaign().missing()
    assert len(rig.campaign().finished()) == 4


def test_the_machine_is_calibrated_once(rig: Rig) -> None:
    rig.campaign().run()
    assert rig.starts == ["none", "ours"], "calibrated where it stands; then one start for all repeats"
    assert rig.campaign().calibration.capacity_per_s > 0
    rig.campaign().run()
    assert len(rig.starts) == 2


def test_one_odd_round_does_not_move_the_calibration(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of the three takes half the time at batch 8 and five times as long with all places taken."""
    usual = rig.send
    factors = {"8 at a time": iter([1.0, 0.5, 1.0]), "48 at a time": iter([1.0, 5.0, 1.0])}

    def odd_once(point: Point, *_: object) -> Sent:
        factor = next(factors[point.name]) if point.name in factors else 1.0
        sent = usual(point)
        outcomes = tuple(replace(one, latency_s=factor * one.latency_s, ttft_s=0.0) for one in sent.outcomes)
        return Sent(factor * sent.seconds, outcomes, None)

    monkeypatch.setattr(module, "send", odd_once)
    rig.campaign().run()
    found = rig.campaign().calibration
    assert found.capacity_per_s == pytest.approx(96)
    assert found.step_s_at_batch_8 == pytest.approx(1 / 63)
    assert all(next(left, None) is None for left in factors.values())


def test_a_point_beside_a_busy_neighbour_is_measured_again(rig: Rig) -> None:
    """0.9, then 0.5, then 0.0 cores: the third attempt counts, and the next system needs one only."""
    readings = [0.0, 0.9, 0.0, 0.5, 0.0, 0.0] + [0.0] * 100
    rig.others_cores = iter(readings)
    campaign = rig.campaign()
    campaign.run()
    assert rig.sent.count("high at 1") == ATTEMPTS + 3
    assert {point.others_cores for run in campaign.finished() for point in run.points} == {0.0}


def test_a_neighbour_that_stays_does_not_stop_the_run(rig: Rig) -> None:
    rig.others_cores = iter([0.5] * 1000)
    campaign = rig.campaign()
    campaign.run()
    assert not campaign.missing()
    assert rig.sent.count("high at 1") == 4 * ATTEMPTS
    assert all(point.others_cores == 0.5 for run in campaign.finished() for point in run.points)


def test_a_failed_request_fails_its_run_with_the_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def refused(point: Point, *_: object) -> Sent:
        return Sent(1.0, tuple(Outcome(one.phase, "", 0.0, 0.0, 0, "HTTP 500") for one in point.requests), None)

    rig.calibrate()
    monkeypatch.setattr(module, "send", refused)
    campaign = Campaign(load_testbed(), (SCENARIO,), load_data(), Size.DEFAULT, said.append, rig.folder)
    campaign.run()
    assert len(campaign.missing()) == 4
    assert any("HTTP 500" in line for line in said)


def test_a_system_that_dies_leaves_the_others_their_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: one server falls over at a point, and what the others measured in the round is lost."""
    rig.calibrate()
    died: list[str] = []

    def check_alive(_server: FakeServer) -> None:
        if len(rig.sent) == 6 and not died:  # somewhere in the first round
            died.append("once")
            raise ServerError("it ended under load")

    monkeypatch.setattr(FakeServer, "check_alive", check_alive)
    rig.campaign().run()
    assert died
    assert len(rig.campaign().missing()) == 1


def test_how_slow_the_machine_was_is_kept_with_the_point(rig: Rig) -> None:
    rig.calibrate()
    rig.work_us = 150.0
    rig.campaign().run()
    assert {point.slowness for run in rig.campaign().finished() for point in run.points} == {1.5}


def test_a_point_of_which_the_machines_speed_is_not_known_counts_for_nothing(rig: Rig) -> None:
    rig.calibrate()
    rig.work_us = None
    rig.campaign().run()
    assert len(rig.campaign().missing()) == 4
