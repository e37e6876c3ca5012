"""Runs what is left of the compared scenarios, the systems taking turns, and keeps what it measured."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

from outrider_runtime.local_manifest import LocalManifestError

from tests.benchmarks.evidence import synthetic
from tests.benchmarks.evidence.budget import seconds_left
from tests.benchmarks.evidence.load import Sent, send
from tests.benchmarks.evidence.manifest import base_manifest
from tests.benchmarks.evidence.plan import Calibration, Planned, Point, points
from tests.benchmarks.evidence.profile import check_mounted
from tests.benchmarks.evidence.prompts import Data
from tests.benchmarks.evidence.raw import FOLDER, MeasuredPoint, Run, RunName, Store, code_version, key_of
from tests.benchmarks.evidence.scenario import ComparedScenario, Size, SLOMix, System, SystemKind, Testbed
from tests.benchmarks.evidence.schedule import Round, Sitting, left, sittings
from tests.benchmarks.evidence.server import Server, machine_cpu_s
from tests.benchmarks.evidence.speedometer import Speedometer
from tests.benchmarks.evidence.start import Starter
from tests.benchmarks.evidence.timed_load import send_timed

CALIBRATION_GROUP = "mid"
WARM_UP = {1: 2, 4: 8}
"""Requests at a time: how many. Of every system, before anything is measured."""
CAPACITY_AT = 48
CALIBRATION_ROUNDS = 3
"""Of one round alone, a fast spell of the machine would be in every rate and every SLO class."""
QUIET_CORES = 0.25
"""An engine whose threads wait for each other runs at a third of its speed beside a neighbour of one core."""
ATTEMPTS = 3
LOOSE_TPOT_S = 60.0
FAILURES = (RuntimeError, ValueError, OSError, LocalManifestError)
"""Of one system, which is then left out."""
Say = Callable[[str], None]


def say_at_once(text: str) -> None:
    print(text, flush=True)


class PointFailedError(RuntimeError):
    """Requests of a point failed; the message holds the first error."""


@dataclass(frozen=True)
class Campaign:
    """What `make bench` measures at one size."""

    testbed: Testbed
    scenarios: tuple[ComparedScenario, ...]
    data: Data
    size: Size
    say: Say = say_at_once
    folder: Path = FOLDER

    def run(self) -> None:
        """Measures what is left. A system that fails is left out, and said."""
        remaining = left(self._planned, lambda one, system: self._store.has(self._name(one, system)))
        minutes = seconds_left(remaining, self.testbed, self.data) / 60
        starts = sum(len(sitting.systems) for sitting in remaining)
        self.say(f"{_clock()} {starts} starts of a server are left, about {minutes:.0f} minutes on two quiet cores")
        for sitting in remaining:
            with ExitStack() as stack:
                stack.enter_context(self._speedometer)
                servers = self._servers(sitting, stack)
                for one in sitting.rounds if servers else ():  # else no calibration either, perhaps
                    self._round(one, servers)

    def finished(self) -> list[Run]:
        """All the wanted runs that are there."""
        return self._store.load(self._wanted())

    def missing(self) -> list[str]:
        """The wanted runs that are not, in words."""
        wanted = {name for name in self._wanted() if not self._store.has(name)}
        words = {(one.scenario, one.system, one.repeat) for one in wanted}
        return [f"scenario {one}: {system}, repeat {repeat}" for one, system, repeat in sorted(words)]

    # -- what is there already --------------------------------------------------------------------------------------

    @cached_property
    def _store(self) -> Store:
        return Store(self.folder)

    @cached_property
    def version(self) -> str:
        """Digest of the code, the testbed and the data: results of another version are not this run's."""
        return key_of(code_version(), self.testbed.model_dump(), self.data.prompts, self.data.gaps_s)

    def _key(self, scenario: ComparedScenario) -> str:
        return key_of(self.version, self.size.value, scenario.model_dump(exclude={"repeats", "systems", "title"}))

    @cached_property
    def _planned(self) -> list[Sitting]:
        order = [system.name for system in self.testbed.systems]
        return list(sittings(self.scenarios, order, self.testbed.references))

    def _wanted(self) -> Iterator[RunName]:
        for one in (one for sitting in self._planned for one in sitting.rounds):
            yield from (self._name(one, system) for system in one.systems)

    def _name(self, one: Round, system: str) -> RunName:
        return RunName(one.scenario.scenario, one.repeat, one.sitting, system, self._key(one.scenario))

    # -- servers that are up together ---------------------------------------------------------------------------------

    def _servers(self, sitting: Sitting, stack: ExitStack) -> dict[str, Server]:
        """Those that started, warm and paused. Profiles are measured before any server is up; ours comes last, as its
        SLO classes are parts of what stock vLLM does beside the others."""
        systems = [system for system in map(self.testbed.system, sitting.systems) if self._is_prepared(system)]
        ours = [system for system in systems if system.kind is SystemKind.OURS]
        baselines = self._up([system for system in systems if system not in ours], sitting, stack)
        with self._left_out("calibration"):
            self._calibrate(baselines)
            return baselines | self._up(ours, sitting, stack)
        return {}

    def _is_prepared(self, system: System) -> bool:
        with self._left_out(system.name):
            self._starter.prepare(system)
            return True
        return False

    def _up(self, systems: Sequence[System], sitting: Sitting, stack: ExitStack) -> dict[str, Server]:
        """They start side by side, as most of a start is one thread's work, and are warmed up one by one."""
        launched: dict[str, Server] = {}
        servers: dict[str, Server] = {}
        for system in systems:
            with self._left_out(system.name):
                launched[system.name] = self._launched(system, sitting)
                stack.callback(launched[system.name].stop)
        for name, server in launched.items():
            with self._left_out(name):
                server.wait_until_ready()
                servers[name] = server
        return {name: server for name, server in servers.items() if self._is_warm(name, server)}

    def _launched(self, system: System, sitting: Sitting) -> Server:
        self.say(f"{_clock()} starting {system.name}")
        classes = self._classes(self.calibration) if system.kind is SystemKind.OURS else {}
        return self._starter.start(system, classes, controlled=sitting.controlled)

    def _is_warm(self, name: str, server: Server) -> bool:
        with self._left_out(name):
            for slots, total in WARM_UP.items():
                self._send(server, self._closed_point(slots, total))
            if self._starter.profiled:
                check_mounted(server.state())
            server.pause()
            return True
        return False

    @contextmanager
    def _left_out(self, name: str) -> Iterator[None]:
        """Whatever fails inside is said, and the run goes on without it."""
        try:
            yield
        except FAILURES as error:
            self.say(f"  FAILED: {name}: {error}")

    def _round(self, one: Round, servers: Mapping[str, Server]) -> None:
        """A system that fails at a point is left out of the rest of the round."""
        measured: dict[str, list[MeasuredPoint]] = {name: [] for name in one.systems if name in servers}
        wanted = points(one.scenario, self.testbed, self.data, self.calibration, one.repeat)
        for number, point in enumerate(wanted):
            for name in [name for name in one.turns(number) if name in measured]:
                try:
                    measured[name].append(self._measure(servers[name], point))
                except FAILURES as error:
                    self.say(f"  FAILED: {name}: {error}")
                    del measured[name]
        for name, found in measured.items():
            self._store.save(self._run_of(one, name, tuple(found), servers[name].memory_mb()))
        self.say(f"{_clock()} repeat {one.repeat}, scenario {one.scenario.scenario}: {_in_short(measured)}")

    def _run_of(self, one: Round, system: str, measured: tuple[MeasuredPoint, ...], memory_mb: float) -> Run:
        return Run(
            **self._name(one, system)._asdict(), points=measured, memory_mb=round(memory_mb),
            load_average=round(os.getloadavg()[0], 2), finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip

    def _measure(self, server: Server, point: Point) -> MeasuredPoint:
        """Again where something else on the machine took more than a little of it; the quietest attempt counts."""
        if point.acceptance is not None:
            synthetic.set_acceptance(self._scratch, point.acceptance)
        with server.awake():
            quietest = self._attempt(server, point)
            for _ in range(ATTEMPTS - 1):
                if quietest.others_cores <= QUIET_CORES:
                    break
                quietest = min(quietest, self._attempt(server, point), key=lambda one: one.others_cores)
            return quietest

    def _attempt(self, server: Server, point: Point) -> MeasuredPoint:
        before, others_s = server.state(), _others_cpu_s(server)
        sent, work_us = self._timed(server, point)
        others_cores = (_others_cpu_s(server) - others_s) / sent.seconds
        return MeasuredPoint(
            name=point.name, seconds=sent.seconds, outcomes=sent.outcomes, accepted_per_draft=sent.accepted_per_draft,
            others_cores=round(others_cores, 2),
            slowness=1.0 if sent.final else round(work_us / self.calibration.work_us, 4),
            state_before=before, state_after=server.state(),
        )  # fmt: skip

    def _timed(self, server: Server, point: Point) -> tuple[Sent, float]:
        """And how long the speedometer's work took meanwhile."""
        mark = self._speedometer.mark()
        sent = self._send(server, point)
        work_us = self._speedometer.work_us_since(mark)
        if work_us is None:
            raise PointFailedError(f"{point.name}: the speedometer says nothing")
        return sent, work_us

    def _closed_point(self, slots: int, total: int) -> Point:
        prompts = self.data.of(self.testbed.categories(CALIBRATION_GROUP))
        requests = tuple(Planned(prompts[index % len(prompts)], phase="") for index in range(total))
        return Point(f"{slots} at a time", requests, concurrency=slots)

    def _send(self, server: Server, point: Point) -> Sent:
        tokens = self.testbed.output_tokens
        if point.concurrency is None:
            clock = self._speedometer.clock(self.calibration.work_us)
            sent = send_timed(point, clock, server.base_url, self._model, tokens)
        else:
            sent = send(point, server.base_url, self._model, tokens)
        server.check_alive()
        failed = [one.error for one in sent.outcomes if one.error or not one.tokens]
        if failed:
            raise PointFailedError(f"{point.name}: {len(failed)} of {len(sent.outcomes)} requests failed: {failed[0]}")
        return sent

    # -- what every system needs -------------------------------------------------------------------------------------

    @cached_property
    def _scratch(self) -> Path:
        """Logs, manifests, the profile and the calibration of this version."""
        return self.folder / self.version

    @cached_property
    def _speedometer(self) -> Speedometer:
        self._scratch.mkdir(parents=True, exist_ok=True)
        return Speedometer(self._scratch / "speed.txt")

    @cached_property
    def _model(self) -> str:
        name: str = base_manifest(self.testbed)["spec"]["target"]["name"]
        return name

    @cached_property
    def _starter(self) -> Starter:
        pools = [system.pool for system in self.testbed.systems if system.kind is SystemKind.OURS]
        return Starter(self.testbed, self._scratch, max(pools, key=len), profiled=self.size is not Size.QUICK)

    @property
    def calibration(self) -> Calibration:
        """What the rates and the SLO classes of every system are parts of. Raises OSError before it was measured."""
        return Calibration(**json.loads(self._calibration_file.read_text()))

    @property
    def _calibration_file(self) -> Path:
        return self._scratch / "calibration.json"

    def _calibrate(self, servers: Mapping[str, Server]) -> None:
        """Once a version: on stock vLLM as it stands among the servers, or alone where it is not one of them."""
        if self._calibration_file.is_file():
            return
        stock = next(one for one in self.testbed.systems if one.kind is SystemKind.STOCK)
        self.say(f"{_clock()} calibrating: capacity and step time of {stock.name}")
        if stock.name in servers:
            with servers[stock.name].awake():
                found = self._measured_capacity(servers[stock.name])
        else:
            with self._starter.start(stock, {}) as server:
                self._send(server, self._closed_point(4, 8))
                found = self._measured_capacity(server)
        self._calibration_file.write_text(json.dumps(asdict(found)))

    def _measured_capacity(self, server: Server) -> Calibration:
        """Medians of the rounds' rates and of all their requests' TPOT, at the machine's mean speed meanwhile."""
        eights, mosts = [], []
        for _ in range(CALIBRATION_ROUNDS):
            eights.append(self._timed(server, self._closed_point(8, 24)))
            mosts.append(self._timed(server, self._closed_point(CAPACITY_AT, 2 * CAPACITY_AT)))
        work_us = fmean(us for _, us in eights + mosts)
        return Calibration(
            capacity_per_s=median(len(sent.outcomes) / sent.seconds * us / work_us for sent, us in mosts),
            step_s_at_batch_8=median(one.tpot_s * work_us / us for sent, us in eights for one in sent.outcomes),
            work_us=work_us,
        )

    def _classes(self, stock: Calibration) -> dict[str, float]:
        """SLO classes of ours in every scenario; requests that name none are in one that cannot be missed."""
        mixes = [one for one in self.scenarios if isinstance(one, SLOMix)]
        named = {one.name: one.step_times * stock.step_s_at_batch_8 for mix in mixes for one in mix.classes}
        return {**named, "any": LOOSE_TPOT_S}


def _others_cpu_s(server: Server) -> float:
    return machine_cpu_s() - server.cpu_s() - time.process_time()


def _clock() -> str:
    return datetime.now(UTC).strftime("%H:%M:%S")


def _in_short(measured: Mapping[str, Sequence[MeasuredPoint]]) -> str:
    speeds = [f"{name} {fmean(one.tokens_per_s for one in found):.0f}" for name, found in measured.items()]
    return f"{', '.join(speeds)} tok/s"
