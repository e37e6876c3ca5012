"""Systems that take slices of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.benchmarks.evidence.slices import Job, Stopwatch, in_slices

SLICE_S = 0.02


class Machine:
    """Who has it, and who had it in turn."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.has_it: str | None = None
        self.gone: set[str] = set()

    def awake(self, name: str) -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def found() -> Iterator[None]:
            if name in self.gone:
                raise RuntimeError(f"{name} ended")
            assert self.has_it is None
            self.has_it = name
            self.turns.append(name)
            yield
            self.has_it = None

        return found


@pytest.fixture
def machine() -> Machine:
    return Machine()


def job(machine: Machine, name: str, slices: int) -> Job[float]:
    """Done in so many slices."""

    async def work(stopwatch: Stopwatch) -> float:
        assert machine.has_it == name, "it begins in its own slice"
        while machine.turns.count(name) < slices:
            await asyncio.sleep(SLICE_S / 10)
        return stopwatch()

    return Job(machine.awake(name), work)


def test_they_take_turns_and_one_that_is_done_leaves_its_slices_to_the_others(machine: Machine) -> None:
    found = asyncio.run(in_slices({name: job(machine, name, n) for name, n in (("a", 2), ("b", 3), ("c", 2))}, SLICE_S))
    assert machine.turns == ["a", "b", "c", "a", "b", "c", "b"]
    assert machine.has_it is None
    assert all(isinstance(one, float) and one >= SLICE_S for one in found.values())


def test_one_alone_is_not_interrupted(machine: Machine) -> None:
    async def work(stopwatch: Stopwatch) -> float:
        await asyncio.sleep(3 * SLICE_S)
        return stopwatch()

    asyncio.run(in_slices({"a": Job(machine.awake("a"), work)}, SLICE_S))
    assert machine.turns == ["a"]


def test_one_that_fails_or_ends_costs_the_others_nothing(machine: Machine) -> None:
    async def refused(_stopwatch: Stopwatch) -> float:
        raise ValueError("refused")

    async def ends(stopwatch: Stopwatch) -> float:
        machine.gone.add("ends")
        await asyncio.Event().wait()
        return stopwatch()

    machine.gone.add("never there")
    found = asyncio.run(
        in_slices(
            {
                "refused": Job(machine.awake("refused"), refused),
                "ends": Job(machine.awake("ends"), ends),
                "never there": job(machine, "never there", 1),
                "fine": job(machine, "fine", 3),
            },
            SLICE_S,
        )
    )
    assert isinstance(found["refused"], ValueError)
    assert str(found["ends"]) == "ends ended"
    assert str(found["never there"]) == "never there ended"
    assert isinstance(found["fine"], float)


def test_a_stopwatch_stands_still_between_its_slices() -> None:
    wall = iter([0.0, 1.0, 2.0, 10.0, 10.5, 11.0])
    stopwatch = Stopwatch(lambda: next(wall))
    assert stopwatch() == 0.0
    with stopwatch.running():
        assert stopwatch() == 1.0
    assert stopwatch() == 2.0
    with stopwatch.running():
        assert stopwatch() == 2.5
    assert stopwatch() == 3.0
