"""Read metadata.managedFields: the newest writer of a field, writers in turn, and what an apply must remove.

Apply removes fields that the manager applied before and no longer sends. Fields that the same manager wrote by a create
or an update are in a separate entry and would stay for ever. `claimed` merges both entries.

Two writers may set `spec.replicas` in turn, such as an autoscaler and a manifest in Git. Each undoes what the other
did, so that pods come and go. Each write by itself is a good one: only their order tells (`rivals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider_operator.validation.reading import text, unix_seconds

Entry = dict[str, Any]
"""An item of metadata.managedFields."""
CONTEST_S = 6 * 3600.0
"""Seconds for which a write counts. Argo CD and Flux write what stands in Git every few minutes, or once an hour."""
_TURNS = 4
"""Writes in turn that are a contest: one change by hand under an autoscaler leaves three."""


def claimed(entries: Sequence[Entry], manager: str) -> list[Entry] | None:
    """`entries` with all fields that `manager` wrote counted as applied; None if they are already."""
    written = [entry for entry in entries if _is_own(entry, manager)]
    if all(entry["operation"] == "Apply" for entry in written):
        return None
    fields: dict[str, Any] = {}
    for entry in written:
        fields = _union(fields, entry.get("fieldsV1") or {})
    applied = {**written[-1], "operation": "Apply", "fieldsV1": fields}
    return [*(entry for entry in entries if not _is_own(entry, manager)), applied]


def newest_writer(entries: Sequence[Entry], *path: str) -> str:
    """Manager of the newest entry that has the field at `path`; empty if none has it."""
    writers = [entry for entry in entries if _has(entry.get("fieldsV1"), path)]
    newest = max(writers, key=lambda entry: unix_seconds(text(entry, "time")) or 0.0, default={})
    return str(newest.get("manager") or "")


def _has(fields: Any, path: Sequence[str]) -> bool:
    for name in path:
        if not isinstance(fields, dict) or f"f:{name}" not in fields:
            return False
        fields = fields[f"f:{name}"]
    return True


def _is_own(entry: Entry, manager: str) -> bool:
    return entry.get("manager") == manager and not entry.get("subresource")


def _union(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Union of two sets of fields, which are nested objects with empty leaves."""
    return {name: _union(left.get(name, {}), right.get(name, {})) for name in {**left, **right}}


@dataclass(frozen=True)
class ReplicaWriter:
    """A manager of `spec.replicas`, and the Unix time at which it was first seen in its turn."""

    manager: str
    at: float


def noted(turns: Sequence[ReplicaWriter], manager: str, at: float) -> tuple[ReplicaWriter, ...]:
    """The turns with the field's present `manager`; empty: it has none."""
    recent = tuple(turn for turn in turns if at - turn.at < CONTEST_S)
    if not manager or (recent and recent[-1].manager == manager):
        return recent
    return (*recent, ReplicaWriter(manager, at))[-_TURNS:]


def rivals(turns: Sequence[ReplicaWriter]) -> tuple[str, ...]:
    """The two managers that wrote in turn; empty without a contest."""
    managers = [turn.manager for turn in turns]
    pair = tuple(sorted({*managers}))
    return pair if len(managers) == _TURNS and len(pair) == 2 else ()
