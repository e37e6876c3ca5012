"""Is this pod ready, and is it alive? Pure decisions over what the server observed of the engine.

Readiness asks whether a request would be served as promised: vLLM swallows plugin load errors, so "the engine is up"
is not enough, the controller must have reported. Liveness asks whether only a restart can help: a busy engine is
alive, one that has requests and has finished no step for minutes is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

STALE_S = 30.0
"""The engine writes its state four times a second; a starved machine may delay that, but not by this much."""
WEDGED_S = 180.0
"""Longer than any one step, a first-use kernel compilation included."""


class Phase(StrEnum):
    STARTING = "Starting"
    SERVING = "Serving"
    DRAINING = "Draining"


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the server observed, ages in seconds of the monotonic clock (it stands still while a machine sleeps)."""

    phase: Phase
    engine_dead: bool = False
    plugin_active: bool = False
    """The controller's own claim, in its last snapshot."""
    report_age_s: float | None = None
    """Since a new snapshot was seen; None when there was none yet."""
    progress_age_s: float = 0.0
    """Since the engine finished a step or had nothing to do."""
    loop_age_s: float = 0.0
    """Since the API server's event loop last ran."""


def plugin_reports(vitals: Vitals) -> bool:
    return vitals.plugin_active and vitals.report_age_s is not None and vitals.report_age_s < STALE_S


def why_not_ready(vitals: Vitals) -> str:
    """A sentence; empty when the pod is ready."""
    if vitals.phase is Phase.STARTING:
        return "the engine is starting"
    if vitals.phase is Phase.DRAINING:
        return "the server is draining: it finishes running requests and then exits"
    if vitals.engine_dead:
        return "the engine process has died"
    if vitals.report_age_s is None:
        return "the plugin inside the engine has not reported: it was not loaded, or failed while loading"
    if not vitals.plugin_active:
        return "the plugin inside the engine is not active"
    if not plugin_reports(vitals):
        return f"the plugin inside the engine last reported {vitals.report_age_s:.0f} s ago"
    return ""


def why_not_alive(vitals: Vitals) -> str:
    """A sentence; empty while a restart would not help. Start-up has its own budget (the startup probe)."""
    if vitals.phase is Phase.STARTING:
        return ""
    if vitals.engine_dead:
        return "the engine process has died"
    if vitals.loop_age_s > WEDGED_S:
        return f"the API server has been stuck for {vitals.loop_age_s:.0f} s"
    if vitals.progress_age_s > WEDGED_S:
        return f"the engine has requests and has finished no step for {vitals.progress_age_s:.0f} s"
    if vitals.report_age_s is not None and vitals.report_age_s > WEDGED_S:
        return f"the engine process has not reported for {vitals.report_age_s:.0f} s"
    return ""
