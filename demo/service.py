"""Follows a service: prints what changed since the last look."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from demo.console import Console

Kubectl = Callable[..., str]
JsonObject = dict[str, Any]


def get(kubectl: Kubectl, *what: str) -> JsonObject:
    """Get an object or a list as JSON; {} if there is none."""
    text = kubectl("get", *what, "-o", "json", "--ignore-not-found")
    return json.loads(text) if text.strip() else {}


@dataclass
class Follower:
    """Polls a service and its children, and prints what is new."""

    kubectl: Kubectl
    console: Console
    name: str
    _seen: dict[str, str] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """End `until` in another thread, so that an interrupted demo does not wait on."""
        self._stopping.set()

    def follow_until(self, done: Callable[[JsonObject], bool], *, timeout_s: float, what: str) -> JsonObject:
        """Follow the service until `done(service)`. Raises TimeoutError, with the conditions, if it takes too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            service = self.look()
            if done(service):
                return service
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not happen within {timeout_s:.0f} s; conditions: {sentences(service)}")
            if self._stopping.wait(1.0):
                raise TimeoutError(f"interrupted while waiting for {what}")

    def look(self) -> JsonObject:
        """Print what is new since the last look; return the service."""
        service = get(self.kubectl, "specsvc", self.name)
        children = get(self.kubectl, "jobs,configmaps,deployments,pods", "-l", f"outrider.dev/service={self.name}")
        for subject, text in (*_conditions(service), *_rollout(service), *_children(children.get("items", []))):
            if self._seen.get(subject) != text:
                self._seen[subject] = text
                self.console.say(f"{subject:<52} {text}")
        return service


def condition(service: JsonObject, kind: str) -> JsonObject:
    """Return the condition of that type; {} if it is not set yet."""
    conditions: list[JsonObject] = service.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def is_true(service: JsonObject, *kinds: str) -> bool:
    """Whether all these conditions are True and of the newest generation."""
    return all(_current(service, kind).get("status") == "True" for kind in kinds)


def is_measured(service: JsonObject) -> bool:
    """Whether every profile is there. A noisy one counts, too."""
    return is_true(service, "ProfilesReady") or _current(service, "ProfilesReady").get("reason") == "Noisy"


def rollout_phase(service: JsonObject, generation: int = 0) -> str:
    """Return the phase of the draft canary; empty if it belongs to a generation before `generation`."""
    rollout: JsonObject = service.get("status", {}).get("rollout", {})
    return str(rollout.get("phase", "")) if rollout.get("observedGeneration", 0) >= generation else ""


def shows_acceptance(service: JsonObject, draft: str) -> bool:
    """Whether the status has an acceptance rate of this draft."""
    drafts = service.get("status", {}).get("drafts", [])
    return any(row["name"] == draft and row.get("acceptanceRate") for row in drafts)


def _current(service: JsonObject, kind: str) -> JsonObject:
    """Return the condition of that type if it is of the newest generation, else {}."""
    newest = condition(service, kind)
    return newest if newest.get("observedGeneration") == service.get("metadata", {}).get("generation") else {}


def sentences(service: JsonObject) -> str:
    """Return every condition with its message, for an error."""
    conditions = service.get("status", {}).get("conditions", [])
    return "; ".join(f"{c['type']}={c['status']} {c['reason']}: {c.get('message', '')}" for c in conditions)


def _conditions(service: JsonObject) -> Iterator[tuple[str, str]]:
    for c in service.get("status", {}).get("conditions", []):
        yield f"condition {c['type']}", f"{c['status']}  {c['reason']}"


def _rollout(service: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield the canary's summary, once there is one."""
    rollout = service.get("status", {}).get("rollout", {})
    if rollout.get("summary"):
        yield "rollout", rollout["summary"]


def _children(items: list[JsonObject]) -> Iterator[tuple[str, str]]:
    for item in items:
        yield f"{item['kind'].lower()} {item['metadata']['name']}", _summary(item)


def _summary(item: JsonObject) -> str:
    status = item.get("status", {})
    if item["kind"] == "ConfigMap":
        return "holds " + ", ".join(sorted(item.get("data", {})))
    if item["kind"] == "Job":
        finished = [c["type"] for c in status.get("conditions", []) if c["status"] == "True"]
        return finished[-1] if finished else ("running" if status.get("active") else "created")
    if item["kind"] == "Deployment":
        return f"{status.get('readyReplicas', 0)} of {item['spec']['replicas']} ready"
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
    return f"{status.get('phase', 'Unknown')}{', ready' if ready else ''}"
