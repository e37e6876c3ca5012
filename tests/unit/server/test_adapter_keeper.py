"""The keeper over an engine of a few lines: which adapters are offered, for how long, and when one is tried again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from outrider_crds.model_sources import (
    RETRY_REFUSED_AFTER_S,
    AdapterFolder,
    AdapterSource,
    AdapterSpec,
    AdapterVolume,
    HostPathSource,
    Lora,
)
from outrider_crds.runtime_config import HotConfig
from outrider_runtime.hub_download import STALL_S
from outrider_runtime.server import adapter_copies, adapter_keeper
from outrider_runtime.server.adapter_files import AdapterFiles, UnusableAdapterError
from outrider_runtime.server.adapter_keeper import FIRST_RETRY_S, LONGEST_RETRY_S, AdapterKeeper

from tests.engine.engines import hot_config


@dataclass
class Slots:
    """Adapters in memory, by number, and those that requests get, by name."""

    memory: dict[int, str] = field(default_factory=dict)
    offered: dict[str, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    refuses: str = ""
    is_refused: bool = False
    loads: int = 0

    async def add(self, name: str, folder: Path) -> int:
        self.loads += 1
        if self.refuses:
            raise UnusableAdapterError(self.refuses, is_refused=self.is_refused)
        assert (folder / "adapter_model.safetensors").is_file()
        self.memory[self.loads] = name
        return self.loads

    def offer(self, number: int) -> None:
        self.offered[self.memory[number]] = number

    def withdraw(self, name: str) -> None:
        self.offered.pop(name, None)

    def is_used(self, number: int) -> bool:
        return number in self.used

    async def remove(self, number: int) -> None:
        del self.memory[number]


@dataclass
class Pod:
    keeper: AdapterKeeper
    slots: Slots
    folder: Path
    time_s: float = 0.0

    def want(self, **folders: str) -> None:
        specs = [
            AdapterSpec(name=name, source=AdapterSource(folder=AdapterFolder(path=path)))
            for name, path in folders.items()
        ]
        hot = hot_config().model_copy(update={"adapters": specs or None})
        self.keeper.hot_file.write_text(hot.model_dump_json(by_alias=True, exclude_none=True))

    async def pass_by(self) -> None:
        self.keeper.tick()
        await asyncio.gather(*self.keeper._loads.values())
        for _ in range(8):
            await asyncio.sleep(0)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"r": 8}')
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(adapter_keeper, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(adapter_keeper, "LINGER_S", 0.0)
    copies = tmp_path / "copies"
    copies.mkdir()
    lora = Lora(volume=AdapterVolume(host_path=HostPathSource(path=str(tmp_path))))
    files = AdapterFiles(lora, mounted=False, copies=copies)
    slots = Slots()
    made: list[Pod] = []
    keeper = AdapterKeeper(slots, files, tmp_path / "hot.json", hot_config(), clock=lambda: made[0].time_s)
    made.append(Pod(keeper, slots, tmp_path))
    return made[0]


def test_an_adapter_in_use_stays_in_memory_after_its_removal(pod: Pod) -> None:
    """A running request must not lose its weights; new ones of the name are refused at once."""

    async def run() -> None:
        pod.want(a="one")
        await pod.pass_by()
        pod.slots.used = {1}
        pod.want()
        await pod.pass_by()
        assert (pod.slots.offered, pod.slots.memory) == ({}, {1: "a"})
        pod.slots.used.clear()
        await pod.pass_by()
        assert pod.slots.memory == {}

    asyncio.run(run())


def test_another_source_is_offered_once_it_is_loaded(pod: Pod) -> None:
    async def run() -> None:
        pod.want(a="one")
        await pod.pass_by()
        pod.slots.used = {1}
        pod.want(a="two")
        pod.keeper.tick()
        assert pod.slots.offered == {"a": 1}
        await pod.pass_by()
        assert (pod.slots.offered, pod.slots.memory) == ({"a": 2}, {1: "a", 2: "a"})
        pod.slots.used.clear()
        await pod.pass_by()
        assert pod.slots.memory == {2: "a"}

    asyncio.run(run())


def test_an_adapter_that_is_refused_is_tried_less_and_less_often(pod: Pod) -> None:
    async def run() -> None:
        pod.slots.refuses = "it does not\nfit"
        pod.want(a="one", b="two")
        await pod.pass_by()
        assert [state.reason for state in pod.keeper.states()] == ["it does not fit"] * 2
        await pod.pass_by()
        assert pod.slots.loads == 2
        pod.time_s += FIRST_RETRY_S
        await pod.pass_by()
        assert pod.slots.loads == 4
        pod.time_s += FIRST_RETRY_S
        await pod.pass_by()
        assert pod.slots.loads == 4
        pod.slots.refuses = ""
        pod.time_s += FIRST_RETRY_S
        await pod.pass_by()
        assert sorted(pod.slots.offered) == ["a", "b"]
        assert [(state.loaded, state.reason) for state in pod.keeper.states()] == [(True, "")] * 2

    asyncio.run(run())


def test_an_adapter_that_the_hub_refuses_is_tried_hourly(pod: Pod) -> None:
    """Bug: each pod came back every five minutes for a 401. Later, a passing failure waited for minutes after such
    refusals. Another source is tried at once."""

    async def run() -> None:
        pod.slots.refuses, pod.slots.is_refused = "401 Unauthorized", True
        pod.want(a="one")
        await pod.pass_by()
        pod.time_s += RETRY_REFUSED_AFTER_S - 1
        await pod.pass_by()
        assert pod.slots.loads == 1
        pod.time_s += 1
        await pod.pass_by()
        assert pod.slots.loads == 2
        pod.slots.is_refused = False
        for wait_s in (RETRY_REFUSED_AFTER_S, FIRST_RETRY_S):
            pod.time_s += wait_s
            await pod.pass_by()
        assert pod.slots.loads == 4
        pod.want(a="two")
        await pod.pass_by()
        assert pod.slots.loads == 5

    asyncio.run(run())


def test_an_adapter_removed_while_it_loads_is_not_offered(pod: Pod) -> None:
    async def run() -> None:
        pod.want(a="one")
        pod.keeper.tick()
        pod.want()
        await pod.pass_by()
        await pod.pass_by()
        assert (pod.slots.offered, pod.slots.memory) == ({}, {})

    asyncio.run(run())


def test_a_broken_hot_config_changes_no_adapter(pod: Pod) -> None:
    async def run() -> None:
        pod.want(a="one")
        await pod.pass_by()
        pod.keeper.hot_file.write_text("{")
        await pod.pass_by()
        assert pod.slots.offered == {"a": 1}

    asyncio.run(run())


def test_without_a_hot_file_the_adapters_of_the_start_count(pod: Pod) -> None:
    async def run() -> None:
        spec = AdapterSpec(name="a", source=AdapterSource(folder=AdapterFolder(path="one")))
        pod.keeper.at_boot = HotConfig.model_validate({**hot_config().wire(), "adapters": [spec.wire()]})
        await pod.pass_by()
        assert pod.slots.offered == {"a": 1}

    asyncio.run(run())


@dataclass
class SlowSource:
    """A source whose files come when the test says so."""

    end: threading.Event = field(default_factory=threading.Event)
    copies: list[Path] = field(default_factory=list)
    size: int = 0
    measurements: int = 0

    def fill(self, _: AdapterFiles, folder: Path, __: AdapterSource) -> None:
        self.copies.append(folder)
        self.end.wait(60)
        (folder / "adapter_model.safetensors").write_bytes(b"weights")

    def measure(self, *_: object) -> int:
        self.measurements += 1
        return self.size

    async def measured(self) -> None:
        """Wait until the size of now has been read, and the copy goes on."""
        last = self.measurements
        await until(lambda: self.measurements >= last + 3)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowSource]:
    source = SlowSource()
    monkeypatch.setattr(adapter_copies, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(AdapterFiles, "fill", lambda *call: source.fill(*call))
    monkeypatch.setattr(AdapterFiles, "bytes_on_disk", source.measure)
    yield source
    source.end.set()  # a process that still loads ends at once, and so would this one


async def test_copy_that_stalls_is_awaited_again(pod: Pod, slow: SlowSource) -> None:
    """Bug: after half an hour a second copy of the same files began, whatever had come by then, and a third, while
    the folders of the earlier ones stayed on the disk, unused."""
    pod.want(a="one")
    for _ in range(2):
        pod.keeper.tick()
        await slow.measured()
        assert pod.keeper._loads
        pod.time_s += STALL_S + 1
        await pod.pass_by()
        assert [state.reason for state in pod.keeper.states()] == ["no byte of its files came for 300 s"]
        pod.time_s += LONGEST_RETRY_S
    slow.end.set()
    await pod.pass_by()
    assert pod.slots.offered == {"a": 1}
    assert len(slow.copies) == 1


async def test_slow_copy_goes_on_while_bytes_come(pod: Pod, slow: SlowSource) -> None:
    """Bug: a copy had 30 minutes in all."""
    pod.want(a="one")
    pod.keeper.tick()
    for _ in range(20):
        slow.size += 1
        await slow.measured()
        pod.time_s += STALL_S - 1
    assert pod.keeper._loads
    slow.end.set()
    await pod.pass_by()
    assert pod.slots.offered == {"a": 1}


async def test_copy_of_a_source_listed_no_longer_is_deleted(pod: Pod, slow: SlowSource) -> None:
    """Another source does not wait for it, either."""
    pod.want(a="one")
    pod.keeper.tick()
    await until(lambda: len(slow.copies) == 1)
    pod.want(a="two")
    await pod.pass_by()
    pod.keeper.tick()
    await until(lambda: len(slow.copies) == 2)
    slow.end.set()
    await pod.pass_by()
    assert pod.slots.offered == {"a": 1}
    await until(lambda: [folder.exists() for folder in slow.copies] == [False, True])
