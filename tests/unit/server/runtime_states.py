"""The state that a pod reports, with no more than it must have."""

from __future__ import annotations

from typing import Any

from outrider_crds.runtime_state import RuntimeState


def runtime_state(**fields: Any) -> RuntimeState:
    """Return a state with these fields; the others that have no default are those of a pod that is starting."""
    required = {"service": "chat", "namespace": "demo", "revision": "chat-1", "config_hash": "abc"}
    starting = {"started_at": 1.0, "reported_at": 2.0, "ready": False, "plugin_active": False}
    return RuntimeState(**{**required, **starting, **fields})
