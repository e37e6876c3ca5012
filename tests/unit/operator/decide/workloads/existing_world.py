"""A service that selects pods of another workload, and those pods."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from outrider_crds.base import digest
from outrider_crds.runtime_state import RuntimeState
from outrider_operator.cluster_model import CONFIG_MAP, Object, Observed

from tests.unit.operator.decide.world import START, World, copied, manifest, rfc3339

EXISTING = {"existing": {"podSelector": {"matchLabels": {"app": "llama"}}}}


class ExistingWorld(World):
    """The user's Deployment makes two ready pods."""

    def __init__(self, *pods: str, **spec: Any) -> None:
        super().__init__(manifest(workload=EXISTING, **spec))
        self.selected = {pod: _pod(pod) for pod in pods or ("llama-a", "llama-b")}
        self.rivals: dict[str, str] = {}

    def observed(self, name: str = "chat") -> Observed:
        observed, states = super().observed(name), {pod: s for pod, s in self.states.items() if pod in self.selected}
        return replace(observed, pods=copied(tuple(self.selected.values())), states=states, pod_rivals=self.rivals)

    def report_states(self, name: str = "chat", **fields: Any) -> None:
        """Each pod answers with the mounted file in force, where `fields` says nothing else."""
        for pod in self.selected:
            self.states[pod] = RuntimeState(
                service="llama",
                namespace="default",
                revision="local",
                config_hash="x",
                started_at=START,
                reported_at=self.now,
                ready=True,
                **({"plugin_active": True, "file_digest": digest(self.file(name))} | fields),
            )

    def file(self, name: str = "chat") -> dict[str, Any]:
        """The file in the pods' ConfigMap."""
        (text,) = self.objects[CONFIG_MAP, f"{name}-config"]["data"].values()
        content: dict[str, Any] = json.loads(text)
        return content

    def end_readiness(self, pod: str) -> None:
        self.selected[pod]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]


def _pod(name: str) -> Object:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": {"app": "llama"}}
    return {
        "metadata": {**metadata, "creationTimestamp": rfc3339(START)},
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
