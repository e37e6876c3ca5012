"""Read fields of Kubernetes objects that anyone may have written. A wrong type counts as absent; nothing raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from outrider_crds.texts import cut as cut

from outrider_operator.cluster_model import COMPONENT_LABEL, Object


def dig(document: Any, *path: str) -> Any:
    """The value at `path`; None if a key is missing or a value on the way is not an object."""
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
    """The objects in a list; other items are left out."""
    value = dig(document, *path)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def condition_of(document: Object, kind: str) -> Object:
    """status.conditions[type=kind]; {} if there is none."""
    return next((c for c in items(document, "status", "conditions") if c.get("type") == kind), {})


def is_true(document: Object, kind: str) -> bool:
    """Does the condition exist, and is it True?"""
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
    """Owner references of the object."""
    return items(document, "metadata", "ownerReferences")


def controller_of(document: Object) -> Object:
    """Owner reference of the object's controller; {} if it has none."""
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


def ended(pod: Any, container: str) -> Object:
    """How the pod's container of this name ended; {} before."""
    statuses = items(pod, "status", "containerStatuses")
    return next((mapping(status, "state", "terminated") for status in statuses if status.get("name") == container), {})


def created_s(document: Any) -> float:
    """Unix time of the object's creation; 0 if it does not say."""
    return unix_seconds(text(document, "metadata", "creationTimestamp")) or 0.0


def last_lines(message: str, most: int) -> str:
    """The last lines of what a container said, at most so many, in one line; empty where it said nothing."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " | ".join(lines[-most:])


@dataclass(frozen=True)
class InvalidInput:
    """Result of validation in place of a value."""

    source: str
    """Kind of source, from a short list: it labels a metric."""
    reason: str
    """CamelCase reason, from a short list: it labels a metric."""
    detail: str = ""
    """Sentence for people, of bounded length."""
