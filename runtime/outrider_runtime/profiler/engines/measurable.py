"""Interface of an engine to the profiler: how its process is launched, and how that process runs steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider_crds.runtime_config import BootConfig, HotConfig

from outrider_runtime.drafters.pool import HostedPool
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.paths import Paths
from outrider_runtime.profiler.grid import EngineLimits


class RunningRequest(NamedTuple):
    """A request in the engine's batch."""

    tokens: int
    """Tokens of the prompt and the answer so far."""
    decodes: bool
    """Whether its prefill is complete."""


class ProfilerEngine(Protocol):
    """An engine in this process, which schedules as when it serves. Only one thread may call it."""

    loop: ControlLoop
    limits: EngineLimits
    vocabulary: int
    on_cpu: bool
    device: str
    """The engine's name of the device."""
    version: str
    report_delay_steps: int
    """Steps until the loop reports a step. With asynchronous scheduling, a step's output arrives with the next step and
    the device's times with the one after."""

    @property
    def has_requests(self) -> bool:
        """Whether the engine has requests to run."""

    @property
    def running(self) -> Sequence[RunningRequest]:
        """Requests of the batch, in the engine's order."""

    def add(self, name: str, tokens: Sequence[int]) -> None:
        """Add a request that decodes greedily and never ends by itself."""

    def drop(self, names: Sequence[str]) -> None:
        """Abort these requests."""

    def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        """Make the next step verify `lengths[i]` draft tokens of request `running[i]`, whatever was proposed."""

    def step(self) -> None:
        """Run one step."""


class ProfilerLaunch(Protocol):
    """A plan for starting an engine's process, and the failures that the process noted."""

    @property
    def pool(self) -> HostedPool:
        """The drafters that the engine should load, and those that it cannot."""

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Write the files that the process reads, and set its environment."""

    def left_out(self) -> Mapping[str, str]:
        """Return why the started engine did not load a drafter, by drafter name."""

    def name_culprits(self, error: Exception) -> Mapping[str, str]:
        """Return why a drafter made the engine fail with `error`, by drafter name."""


@dataclass(frozen=True, slots=True)
class Measurable:
    """The two functions that a module in this package provides for its engine."""

    plan: Callable[[BootConfig, HotConfig, Paths], ProfilerLaunch]
    """Plans a launch, in the profiler's process. Raises RuntimeError if the engine is not installed."""
    start: Callable[[], ProfilerEngine]
    """Starts the engine, in the prepared process. Raises the error that keeps the engine from starting."""
