"""Measures a point on servers that are up together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.evidence import synthetic
from tests.benchmarks.evidence.outcome import Sent
from tests.benchmarks.evidence.own_load import send_by
from tests.benchmarks.evidence.plan import Point
from tests.benchmarks.evidence.raw import MeasuredPoint
from tests.benchmarks.evidence.server import Drafted, Server, machine_cpu_s
from tests.benchmarks.evidence.slices import Job, Stopwatch, in_slices
from tests.benchmarks.evidence.speedometer import Speedometer

QUIET_CORES = 0.25
"""An engine whose threads wait for each other runs at a third of its speed beside a neighbour of one core."""
ATTEMPTS = 3
FAILURES = (RuntimeError, ValueError, OSError)
"""Of one system, which is then left out."""
Servers = Mapping[str, Server]


class _Seen(NamedTuple):
    """What a server says of itself."""

    state: dict[str, Any] | None
    drafted: Drafted | None


class Used(NamedTuple):
    """CPU time, up to a time by the wall clock. Seconds."""

    cpu_s: float
    at_s: float

    def cores_since(self, before: Used) -> float:
        return (self.cpu_s - before.cpu_s) / (self.at_s - before.at_s)


@dataclass(frozen=True)
class Measuring:
    """How every point of a run is measured."""

    speedometer: Speedometer
    usual_us: float
    """What the speedometer's work takes at the speed that counts as the machine's usual one."""
    model: str
    output_tokens: int
    scratch: Path
    say: Callable[[str], None]

    def measure(self, point: Point, servers: Servers) -> dict[str, MeasuredPoint]:
        """Of each system, in slices; one that fails is said and left out. A class promises a time by the wall clock,
        which goes on while a system is stopped: with classes each has the machine to its end."""
        if point.acceptance is not None:
            synthetic.set_acceptance(self.scratch, point.acceptance)
        groups = [{name: server} for name, server in servers.items()] if point.has_classes else [servers]
        return {name: one for group in groups for name, one in self._quietest(point, group).items()}

    def _quietest(self, point: Point, servers: Servers) -> dict[str, MeasuredPoint]:
        """Again where something else on the machine took more than a little of it; the quietest attempt counts."""
        best = self._attempt(point, servers)
        for _ in range(ATTEMPTS - 1):
            if all(one.others_cores <= QUIET_CORES for one in best.values()):
                break
            again = self._attempt(point, {name: servers[name] for name in best})
            best = {name: min(best[name], one, key=lambda one: one.others_cores) for name, one in again.items()}
        return best

    def _attempt(self, point: Point, servers: Servers) -> dict[str, MeasuredPoint]:
        before = self._seen(servers)
        mark, began = self.speedometer.mark(), used_by_others(servers)
        sent = self._sent(point, {name: servers[name] for name in before})
        others_cores = used_by_others(servers).cores_since(began)
        work_us = self.speedometer.work_us_since(mark)
        if work_us is None:
            self.say(f"  FAILED: {point.name}: the speedometer says nothing")
            return {}
        after = self._seen({name: servers[name] for name in sent})
        return {
            name: MeasuredPoint(
                name=point.name, seconds=sent[name].seconds, outcomes=sent[name].outcomes,
                accepted_per_draft=_accepted(before[name].drafted, seen.drafted),
                others_cores=round(others_cores, 2), slowness=round(work_us / self.usual_us, 4),
                state_before=before[name].state, state_after=seen.state,
            )
            for name, seen in after.items()
        }  # fmt: skip

    def _sent(self, point: Point, servers: Servers) -> dict[str, Sent]:
        found = asyncio.run(in_slices({name: self._job(point, server) for name, server in servers.items()}))
        for name, one in found.items():
            if not isinstance(one, Sent):
                self._failed(name, one)
        return {name: one for name, one in found.items() if isinstance(one, Sent)}

    def _job(self, point: Point, server: Server) -> Job[Sent]:
        async def work(stopwatch: Stopwatch) -> Sent:
            clock = self.speedometer.clock(self.usual_us, stopwatch)
            sent = await send_by(clock, point, server.base_url, self.model, self.output_tokens)
            return sent.checked(point.name)

        return Job(server.awake, work)

    def _seen(self, servers: Servers) -> dict[str, _Seen]:
        """Of those that have not ended."""
        found: dict[str, _Seen] = {}
        for name, server in servers.items():
            try:
                with server.awake():
                    found[name] = _Seen(server.state(), server.drafted())
            except FAILURES as error:
                self._failed(name, error)
        return found

    def _failed(self, name: str, error: BaseException) -> None:
        self.say(f"  FAILED: {name}: {error}")


def used_by_others(servers: Servers) -> Used:
    """By all that is neither one of the servers nor this process, so far."""
    ours_s = sum(server.cpu_s() for server in servers.values()) + time.process_time()
    return Used(machine_cpu_s() - ours_s, time.perf_counter())


def _accepted(before: Drafted | None, after: Drafted | None) -> float | None:
    if before is None or after is None or after.drafts == before.drafts:
        return None
    return (after.accepted_tokens - before.accepted_tokens) / (after.drafts - before.drafts)
