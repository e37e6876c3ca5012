"""Follows the engine from the API server's process: its snapshots, whether it gets on, and what both say together.

Ages are taken with the monotonic clock from when a change was seen here, so that neither a step of the wall clock
nor a suspended machine makes an engine look dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider_crds.state import RuntimeState

from outrider_runtime.server.gate import GateFacts
from outrider_runtime.server.health import Phase, Vitals, plugin_reports, why_not_ready

logger = logging.getLogger(__name__)
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ServerView:
    """What the API server knows of itself and of its engine client."""

    phase: Phase = Phase.STARTING
    engine_dead: bool = False
    unfinished: int = 0
    """Requests that the engine client waits for."""
    loop_beat: float | None = None
    """Monotonic time at which the event loop last ran; None before it serves."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The last snapshot, and when (monotonic) something last moved."""

    state: RuntimeState | None
    reported_at: float | None
    progressed_at: float


def sight(before: Sighting, state: RuntimeState | None, unfinished: int, at: float) -> Sighting:
    """The sighting after reading `state` at monotonic time `at`."""
    if state is None:
        return replace(before, progressed_at=at if not unfinished else before.progressed_at)
    is_new = before.state is None or state.now != before.state.now
    stepped = before.state is None or state.steps != before.state.steps
    return Sighting(
        state=state,
        reported_at=at if is_new else before.reported_at,
        progressed_at=at if stepped or not unfinished else before.progressed_at,
    )


class EngineWatch:
    """Polls the snapshot from a thread of its own; everything it hands out is a frozen value."""

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
        self._sighting = Sighting(state=None, reported_at=None, progressed_at=clock())

    def follow(self, server: Callable[[], ServerView]) -> None:
        """From now on `server` says how the API server is."""
        self._server = server

    def start(self) -> None:
        threading.Thread(target=self._poll_forever, name="outrider-watch", daemon=True).start()

    def poll(self) -> None:
        """Look once. A snapshot that cannot be read is an old one: readiness and liveness follow from its age."""
        try:
            state = self._read()
        except (OSError, ValueError) as error:
            logger.error("the engine's snapshot cannot be read: %s", error)
            state = self._sighting.state
        self._sighting = sight(self._sighting, state, self._server().unfinished, self._clock())

    def _poll_forever(self) -> None:
        while True:
            self.poll()
            time.sleep(POLL_S)

    def vitals(self) -> Vitals:
        server, sighting, now = self._server(), self._sighting, self._clock()
        return Vitals(
            phase=server.phase,
            engine_dead=server.engine_dead,
            plugin_active=sighting.state is not None and sighting.state.plugin_active,
            report_age_s=None if sighting.reported_at is None else now - sighting.reported_at,
            progress_age_s=now - sighting.progressed_at,
            loop_age_s=0.0 if server.loop_beat is None else now - server.loop_beat,
        )

    def state(self) -> RuntimeState:
        """The document of `GET /outrider/state`: the engine core's snapshot and what only the server knows."""
        vitals = self.vitals()
        known = self._sighting.state or self._blank
        return known.model_copy(
            update={
                "now": self._wall_clock(),
                "started_at": self._blank.started_at,
                "ready": not why_not_ready(vitals),
                "plugin_active": plugin_reports(vitals),
            }
        )

    def gate_facts(self) -> GateFacts:
        known = self._sighting.state or self._blank
        return GateFacts(
            slo_classes=tuple(slo.name for slo in known.slo_classes), draining=self._server().phase is Phase.DRAINING
        )
