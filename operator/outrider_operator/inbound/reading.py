"""Reading Kubernetes objects that anyone may have written: a wrong type reads as absent, nothing raises."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from outrider_operator.model import COMPONENT_LABEL, Object


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


def is_true(document: Object, kind: str) -> bool:
    """Is the condition there, and True?"""
    return condition_of(document, kind).get("status") == "True"


def label(document: Object, name: str) -> str:
    return text(document, "metadata", "labels", name)


def annotation(document: Object, name: str) -> str:
    return text(document, "metadata", "annotations", name)


def labels_of(document: Object) -> Mapping[str, str]:
    return mapping(document, "metadata", "labels")


def component(document: Object) -> str:
    """Value of Outrider's component label."""
    return label(document, COMPONENT_LABEL)


def name_of(document: Object) -> str:
    return text(document, "metadata", "name")


def namespace_of(document: Object) -> str:
    return text(document, "metadata", "namespace")


def uid_of(document: Object) -> str:
    return text(document, "metadata", "uid")


def owners_of(document: Object) -> list[Object]:
    """Its owner references."""
    return items(document, "metadata", "ownerReferences")


def controller_of(document: Object) -> Object:
    """The owner reference of the object's controller; {} when it has none."""
    return next((owner for owner in owners_of(document) if owner.get("controller")), {})


def controller_uid(document: Object) -> str:
    return text(controller_of(document), "uid")


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
