"""Reads the API server's audit log: which user wrote what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def writes(log: Path) -> list[dict[str, Any]]:
    """Return all writes so far, without a last line that is not complete yet."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def created(log: Path, resource: str, namespace: str) -> list[str]:
    """Return the names of objects that were created, once per creation that succeeded."""
    creates = [entry for entry in writes(log) if entry["verb"] == "create"]
    objects = [entry.get("objectRef", {}) for entry in creates if entry.get("responseStatus", {}).get("code") == 201]
    return [it["name"] for it in objects if (it.get("resource"), it.get("namespace")) == (resource, namespace)]
