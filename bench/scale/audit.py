"""The API server's audit log: author, object, and times of request and response of each write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster import audit

OPERATOR = "outrider-operator"


@dataclass(frozen=True)
class Write:
    """A request that writes. Times in Unix seconds, on the API server's clock."""

    by_operator: bool
    verb: str
    resource: str
    """Resource and subresource: "speculativeservices/status"."""
    namespace: str
    name: str
    requested_at: float
    answered_at: float

    @property
    def took_s(self) -> float:
        return self.answered_at - self.requested_at


def read_writes(log: Path) -> list[Write]:
    """Read all writes so far, except those of Leases."""
    entries = audit.writes(log)
    return [_write(entry) for entry in entries if entry.get("objectRef", {}).get("resource") not in (None, "leases")]


def first_status_s(writes: Iterable[Write], namespace: str) -> dict[str, float]:
    """Return service -> seconds from the answer to its creation to the operator's first write of its status."""
    created, first = dict[str, float](), dict[str, float]()
    for write in writes:
        if write.namespace != namespace:
            continue
        if (write.verb, write.resource) == ("create", "speculativeservices"):
            created[write.name] = write.answered_at
        elif write.by_operator and write.resource == "speculativeservices/status":
            first.setdefault(write.name, write.answered_at)
    return {name: first[name] - at for name, at in created.items() if name in first}


def wake_up_s(writes: Iterable[Write], namespace: str, changed: Mapping[str, float]) -> list[float]:
    """Return the seconds from each change of a service to the operator's write of its hot config.

    The API server's time for the operator's writes to that service in between does not count. changed: service -> Unix
    seconds before its change.
    """
    delays_s = []
    for name, after in changed.items():
        mine = [write for write in writes if write.namespace == namespace and write.requested_at >= after]
        patch = next(w for w in mine if not w.by_operator and (w.resource, w.name) == ("speculativeservices", name))
        hot = next((w for w in mine if w.by_operator and (w.resource, w.name) == ("configmaps", f"{name}-hot")), None)
        if hot is None:
            continue
        between = [w for w in mine if w.by_operator and w.name.startswith(name) and w.answered_at <= hot.requested_at]
        served_s = sum(w.took_s for w in between if w.requested_at >= patch.answered_at)
        delays_s.append(max(0.0, hot.requested_at - patch.answered_at - served_s))
    return delays_s


def _write(entry: Mapping[str, Any]) -> Write:
    what, agent = entry["objectRef"], entry.get("userAgent", "")
    resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
    return Write(
        by_operator=agent == OPERATOR,
        verb=entry["verb"],
        resource=resource,
        namespace=what.get("namespace", ""),
        name=what.get("name", ""),
        requested_at=_seconds(entry["requestReceivedTimestamp"]),
        answered_at=_seconds(entry["stageTimestamp"]),
    )


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
