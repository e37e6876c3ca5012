"""Which fields server-side apply may take away again.

Apply removes what the manager applied before and no longer sends. What the same manager wrote by a create or an update
stands in an entry of its own, which keeps those fields alive for ever. `claimed` makes the two entries one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]
"""An item of metadata.managedFields."""


def claimed(entries: Sequence[Entry], manager: str) -> list[Entry] | None:
    """`entries` with all that `manager` wrote to the object itself counted as applied; None when it is so already."""
    written = [entry for entry in entries if _is_own(entry, manager)]
    if all(entry["operation"] == "Apply" for entry in written):
        return None
    fields: dict[str, Any] = {}
    for entry in written:
        fields = _union(fields, entry.get("fieldsV1") or {})
    applied = {**written[-1], "operation": "Apply", "fieldsV1": fields}
    return [*(entry for entry in entries if not _is_own(entry, manager)), applied]


def _is_own(entry: Entry, manager: str) -> bool:
    return entry.get("manager") == manager and not entry.get("subresource")


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Sets of fields are nested objects, empty at the leaves."""
    return {name: _union(one.get(name, {}), other.get(name, {})) for name in {**one, **other}}
