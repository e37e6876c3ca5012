"""Watches the engine from the API server's process: reads its snapshots and notes whether it makes progress.

Ages are measured with the monotonic clock, from the moment when this process saw a change. So neither a jump of the
wall clock nor a suspended machine makes an engine look dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from outrider_crds.runtime_state import AdapterState, RuntimeState

from outrider_runtime.error_text import with_type
from outrider_runtime.server.gate import GateFacts
from outrider_runtime.server.health import Phase, Vitals, plugin_reports, why_not_ready

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.25
"""The engine writes a snapshot as often."""


@dataclass(frozen=True, slots=True)
class ServerView:
    """What the API server knows about itself and its engine client."""

    phase: Phase = Phase.STARTING
    engine_dead: bool = False
    unfinished: int = 0
    """Requests that the engine has not finished."""
    loop_beat: float | None = None
    """Monotonic time at which the event loop last ran, in seconds; None before it serves."""
    adapters: tuple[AdapterState, ...] = ()
    """LoRA adapters of the hot config, loaded or not."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The engine's last snapshot, and when this process saw a change in it (monotonic times in seconds)."""

    state: RuntimeState | None
    reported_at: float | None
    """When a new snapshot was last seen; None before the first."""
    progressed_at: float
    """When the engine was last seen to have finished a step, or to have no requests."""


def sight(previous: Sighting, state: RuntimeState | None, unfinished: int, at: float) -> Sighting:
    """Return the sighting after `state` was read at monotonic time `at`. state: None before the first snapshot."""
    if state is None:
        return replace(previous, progressed_at=at if not unfinished else previous.progressed_at)
    is_new = previous.state is None or state.reported_at != previous.state.reported_at
    stepped = previous.state is None or state.steps != previous.state.steps
    return Sighting(
        state=state,
        reported_at=at if is_new else previous.reported_at,
        progressed_at=at if stepped or not unfinished else previous.progressed_at,
    )


class EngineWatch:
    """Polls the engine's snapshot from a thread of its own. All its results are frozen values, safe in any thread."""

    def __init__(
        self,
        read: Callable[[], RuntimeState | None],
        blank: RuntimeState,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._read = read
        self._blank = blank
        self._clock = clock
        self._wall_clock = wall_clock
        self._server: Callable[[], ServerView] = ServerView
        self._problem = ""
        """Why the last poll failed."""
        self._sighting = Sighting(state=None, reported_at=None, progressed_at=clock())

    def follow(self, server: Callable[[], ServerView]) -> None:
        """Set the function that describes the API server. It changes when a server is started again."""
        self._server = server

    def start(self) -> None:
        """Poll from a daemon thread until the process ends."""
        threading.Thread(target=self._poll_forever, name="outrider-watch", daemon=True).start()

    def poll(self) -> None:
        """Read the snapshot once. If that fails, the previous one stays, and the probes judge its age."""
        try:
            self._sighting = sight(self._sighting, self._read(), self._server().unfinished, self._clock())
            self._problem = ""
        except Exception as error:  # the thread must survive any: without it the pod ends without a reason
            problem = with_type(error)
            if problem != self._problem:  # it may come four times a second
                logger.error("the engine's report cannot be read", exc_info=error)
            self._problem = problem

    def _poll_forever(self) -> None:
        while True:
            self.poll()
            time.sleep(POLL_INTERVAL_S)

    def vitals(self) -> Vitals:
        """Return what the probes are decided from."""
        server = self._server()
        sighting = self._sighting
        time_s = self._clock()
        return Vitals(
            phase=server.phase,
            engine_dead=server.engine_dead,
            plugin_active=sighting.state is not None and sighting.state.plugin_active,
            report_age_s=None if sighting.reported_at is None else time_s - sighting.reported_at,
            progress_age_s=time_s - sighting.progressed_at,
            report_problem=self._problem,
            loop_age_s=0.0 if server.loop_beat is None else time_s - server.loop_beat,
        )

    def state(self) -> RuntimeState:
        """Return the document of the page `/outrider/state`: the engine's snapshot, with the server's own fields."""
        vitals = self.vitals()
        snapshot = self._sighting.state or self._blank
        return snapshot.model_copy(
            update={
                "reported_at": self._wall_clock(),
                "started_at": self._blank.started_at,
                "ready": not why_not_ready(vitals),
                "plugin_active": plugin_reports(vitals),
                "adapters": _with_counts(self._server().adapters, snapshot.adapters),
            }
        )

    def gate_facts(self) -> GateFacts:
        """Return what the gate decides from. SLO classes come from the engine, which reads the hot config."""
        snapshot = self._sighting.state or self._blank
        return GateFacts(
            slo_classes=tuple(slo.name for slo in snapshot.slo_classes),
            draining=self._server().phase is Phase.DRAINING,
            missing_adapters=frozenset(adapter.name for adapter in self._server().adapters if not adapter.loaded),
        )


def _with_counts(adapters: Iterable[AdapterState], counted: Iterable[AdapterState]) -> list[AdapterState]:
    """Return the server's adapters with the engine's counts. The server knows which are loaded, the engine what ran."""
    counts = {adapter.name: adapter for adapter in counted}
    return [
        counts[adapter.name].model_copy(update={"loaded": adapter.loaded, "reason": adapter.reason})
        if adapter.name in counts
        else adapter
        for adapter in adapters
    ]
