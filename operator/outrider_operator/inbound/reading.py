"""Reading Kubernetes objects that anyone may have written: a wrong type reads as absent, nothing raises."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from outrider_operator.model import Object


def dig(document: Any, *path: str) -> Any:
    """The value at `path`, or None where a step is missing or no object."""
    for key in path:
        if not isinstance(document, dict):
            return None
        document = document.get(key)
    return document


def text(document: Any, *path: str) -> str:
    value = dig(document, *path)
    return value if isinstance(value, str) else ""


def integer(document: Any, *path: str) -> int:
    value = dig(document, *path)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def mapping(document: Any, *path: str) -> Object:
    value = dig(document, *path)
    return value if isinstance(value, dict) else {}


def items(document: Any, *path: str) -> list[Object]:
    """The objects of a list; anything else in it is left out."""
    value = dig(document, *path)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def condition_of(document: Object, kind: str) -> Object:
    """status.conditions[type=kind], or {}."""
    return next((c for c in items(document, "status", "conditions") if c.get("type") == kind), {})


def label(document: Object, name: str) -> str:
    return text(document, "metadata", "labels", name)


def annotation(document: Object, name: str) -> str:
    return text(document, "metadata", "annotations", name)


def name_of(document: Object) -> str:
    return text(document, "metadata", "name")


def uid_of(document: Object) -> str:
    return text(document, "metadata", "uid")


def is_being_deleted(document: Object) -> bool:
    return bool(text(document, "metadata", "deletionTimestamp"))


def unix_seconds(timestamp: str) -> float | None:
    """Unix time of an RFC 3339 timestamp; None for anything else."""
    try:
        moment = datetime.fromisoformat(timestamp)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def cut(message: str, limit: int = 256) -> str:
    """`message` within the CRD's limit, on one line."""
    line = " ".join(message.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
