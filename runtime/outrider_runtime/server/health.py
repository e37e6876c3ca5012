"""Decides whether the pod is ready and whether it is alive, from what the server observed of the engine.

Ready: a request would be served with Outrider's loop. vLLM ignores errors of plugins that fail to load, so a running
engine is not enough; the loop must have reported. Not alive: only a restart can help. A busy engine is alive; an engine
that has requests and has finished no step for minutes is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

STALE_REPORT_S = 30.0
"""Age from which a report no longer counts. The engine reports four times a second; an overloaded machine delays that
by seconds, not by this much."""
STUCK_S = 180.0
"""Time without progress after which the pod is restarted: longer than any step, even one that compiles a kernel."""


class Phase(StrEnum):
    """Phase of the server's life."""

    STARTING = "Starting"
    SERVING = "Serving"
    DRAINING = "Draining"


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the server observed. Ages are in seconds of the monotonic clock, which stops while the machine sleeps."""

    phase: Phase
    engine_dead: bool = False
    plugin_active: bool = False
    """Whether the engine's last report says that Outrider's plugin is active."""
    report_age_s: float | None = None
    """Age of the engine's last report; None before its first."""
    report_problem: str = ""
    """Why the engine's last report could not be read; empty if it could."""
    progress_age_s: float = 0.0
    """Time since the engine last finished a step or was idle."""
    loop_age_s: float = 0.0
    """Time since the API server's event loop last ran."""


def plugin_reports(vitals: Vitals) -> bool:
    """Whether the plugin is active according to a recent report."""
    return vitals.plugin_active and vitals.report_age_s is not None and vitals.report_age_s < STALE_REPORT_S


def why_not_ready(vitals: Vitals) -> str:
    """Return the reason as a sentence; empty when the pod is ready."""
    if vitals.phase is Phase.STARTING:
        return "the engine is starting"
    if vitals.phase is Phase.DRAINING:
        return "the server is draining: it finishes running requests and then exits"
    if vitals.engine_dead:
        return "the engine process has died"
    if vitals.report_age_s is None:
        return _because(vitals).removeprefix(": ") or (
            "the plugin inside the engine has not reported: it was not loaded, or failed while loading"
        )
    if not vitals.plugin_active:
        return "the plugin inside the engine is not active"
    if not plugin_reports(vitals):
        return f"the plugin inside the engine last reported {vitals.report_age_s:.0f} s ago{_because(vitals)}"
    return ""


def why_not_alive(vitals: Vitals) -> str:
    """Return the reason for a restart as a sentence; empty when none is needed. The startup probe limits the start."""
    if vitals.phase is Phase.STARTING:
        return ""
    if vitals.engine_dead:
        return "the engine process has died"
    if vitals.loop_age_s > STUCK_S:
        return f"the API server has been stuck for {vitals.loop_age_s:.0f} s"
    if vitals.progress_age_s > STUCK_S:
        return f"the engine has requests and has finished no step for {vitals.progress_age_s:.0f} s{_because(vitals)}"
    if vitals.report_age_s is not None and vitals.report_age_s > STUCK_S:
        return f"the engine process has not reported for {vitals.report_age_s:.0f} s{_because(vitals)}"
    return ""


def _because(vitals: Vitals) -> str:
    return f": its report cannot be read: {vitals.report_problem}" if vitals.report_problem else ""
