"""How a point is measured on several servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from tests.benchmarks.evidence import measure
from tests.benchmarks.evidence.measure import Measuring, Used
from tests.benchmarks.evidence.outcome import Outcome, Sent
from tests.benchmarks.evidence.plan import Planned, Point
from tests.benchmarks.evidence.server import Drafted, Server
from tests.benchmarks.evidence.speedometer import Speedometer


class FakeServer:
    """Writes into `awake_ones` when it has the machine, and drafts twice as often as tokens are accepted."""

    base_url = "http://nowhere"

    def __init__(self, name: str, awake_ones: list[str]) -> None:
        self._name, self._awake_ones = name, awake_ones
        self._drafts = 0

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._awake_ones.append(self._name)
        yield

    def state(self) -> dict[str, Any]:
        return {}

    def drafted(self) -> Drafted:
        self._drafts += 10
        return Drafted(self._drafts, self._drafts // 2)

    def cpu_s(self) -> float:
        return 0.0


class FakeSpeedometer:
    def mark(self) -> int:
        return 0

    def work_us_since(self, _mark: int) -> float:
        return 150.0

    def clock(self, *_: object) -> None:
        return None


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measuring:
    async def send_by(_clock: object, point: Point, *_: object) -> Sent:
        return Sent(1.0, tuple(Outcome(one.phase, one.slo_class, 1.0, 0.1, 7) for one in point.requests))

    wall = itertools.count()
    monkeypatch.setattr(measure, "send_by", send_by)
    monkeypatch.setattr(measure, "used_by_others", lambda _servers: Used(0.0, next(wall)))
    return Measuring(cast(Speedometer, FakeSpeedometer()), 100.0, "m", 7, tmp_path, print)


def turns(measuring: Measuring, slo_class: str) -> list[str]:
    awake_ones: list[str] = []
    servers = {name: cast(Server, FakeServer(name, awake_ones)) for name in "ab"}
    found = measuring.measure(Point("p", (Planned("one", "x", 0.0, slo_class),)), servers)
    assert {(one.slowness, one.accepted_per_draft) for one in found.values()} == {(1.5, 0.5)}
    return awake_ones


def test_systems_share_the_time_of_a_point(measuring: Measuring) -> None:
    assert turns(measuring, "") == ["a", "b"] * 3, "before it, meanwhile and after it"


def test_where_a_class_promises_a_time_nobody_is_interrupted(measuring: Measuring) -> None:
    assert turns(measuring, "tight") == ["a"] * 3 + ["b"] * 3
