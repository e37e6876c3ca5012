"""An engine as it is measured: first as its process is started, then inside that process, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider_crds.runtime_config import BootConfig, HotConfig

from outrider_runtime.drafters.pool import Pool
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.paths import Paths
from outrider_runtime.profiler.grid import Limits


class Running(NamedTuple):
    """A request that has a place in the batch."""

    tokens: int
    """Of its prompt and its answer."""
    decodes: bool


class Engine(Protocol):
    """One engine, in this process, scheduled as it serves. It is asked from one thread."""

    loop: ControlLoop
    limits: Limits
    vocabulary: int
    on_cpu: bool
    device: str
    """As the engine names it."""
    version: str
    told_late: int
    """Steps that pass before the loop is told of one: with asynchronous scheduling its output comes with the call of
    the next, and the device's times with that one's."""

    @property
    def has_requests(self) -> bool:
        """Steps are to come."""

    @property
    def running(self) -> Sequence[Running]:
        """In the engine's order."""

    def add(self, name: str, tokens: Sequence[int]) -> None:
        """A request whose greedy answer has no end."""

    def drop(self, names: Sequence[str]) -> None:
        """These requests end now."""

    def hold(self, lengths: Sequence[int]) -> None:
        """The next step verifies so many places of each of `running`, whatever was proposed."""

    def step(self) -> None: ...


class Launch(Protocol):
    """What an engine's process is started with."""

    @property
    def pool(self) -> Pool:
        """The drafters that it is to host, and those that it cannot."""

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Write what the process reads, and set its environment."""

    def left_out(self) -> Mapping[str, str]:
        """Drafter -> why the engine, once it has started, does not host it."""

    def blamed(self, error: Exception) -> Mapping[str, str]:
        """Drafter -> why the engine did not start, or did not stay."""


@dataclass(frozen=True, slots=True)
class Measurable:
    plan: Callable[[BootConfig, HotConfig, Paths], Launch]
    """In the profiler's process. Raises RuntimeError where the engine is not installed."""
    start: Callable[[], Engine]
    """In the engine's own process, whose environment was prepared. Raises whatever keeps the engine from starting."""
