"""A quick client for tests: one connection, plain dictionaries, no process of kubectl for every look."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode

from kubernetes import config
from outrider_operator.kinds import DEPLOYMENT, POD, SERVICE, ResourceKind

T = TypeVar("T")
PATIENCE_S = 300.0
"""Seconds to wait for anything: a busy machine is slow, not wrong."""
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"


class RefusedError(Exception):
    """The API server's answer to a request that it did not carry out."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Client:
    def __init__(self, kubeconfig: str) -> None:
        self._client = config.new_client_from_config(kubeconfig)

    def get(self, kind: ResourceKind, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            return self._send("GET", kind.path(namespace, name))
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: ResourceKind, namespace: str | None = None, selector: str = "") -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self._send("GET", kind.path(namespace), {"labelSelector": selector})["items"]
        return items

    def create(self, kind: ResourceKind, document: dict[str, Any]) -> dict[str, Any]:
        return self._send("POST", kind.path(document["metadata"].get("namespace")), body=_typed(kind, document))

    def apply(self, kind: ResourceKind, document: dict[str, Any], manager: str = "tester") -> dict[str, Any]:
        metadata = document["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        query = {"fieldManager": manager, "force": "true"}
        return self._send("PATCH", path, query, _typed(kind, document), _APPLY)

    def patch(
        self, kind: ResourceKind, namespace: str, name: str, change: dict[str, Any], subresource: str | None = None
    ) -> dict[str, Any]:
        return self._send("PATCH", kind.path(namespace, name, subresource), body=change, content_type=_MERGE)

    def delete(self, kind: ResourceKind, namespace: str, name: str, policy: str = "Background") -> None:
        self._send("DELETE", kind.path(namespace, name), {"propagationPolicy": policy})

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        url = f"{self._client.configuration.host}{path}?{urlencode(query or {})}"
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        answer = self._client.call_api(method, url, header_params=headers, body=body)
        answer.read()
        document: dict[str, Any] = json.loads(answer.data)
        if answer.status >= 300:
            raise RefusedError(answer.status, document["message"])
        return document


def _typed(kind: ResourceKind, document: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": kind.api_version, "kind": kind.kind, **document}


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = PATIENCE_S, every_s: float = 0.1) -> T:
    """The first truthy answer of `look`; AssertionError with the last one when none comes in time."""
    deadline = time.monotonic() + timeout_s
    while not (result := look()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}; last seen: {result!r}"
        time.sleep(every_s)
    return result


def condition(service: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """status.conditions[type=kind]; {} where there is none yet."""
    conditions = ((service or {}).get("status") or {}).get("conditions") or []
    return next((entry for entry in conditions if entry["type"] == kind), {})


class Service:
    """One SpeculativeService under test."""

    def __init__(self, client: Client, namespace: str, name: str) -> None:
        self.client = client
        self.namespace = namespace
        self.name = name

    def read(self) -> dict[str, Any]:
        document = self.client.get(SERVICE, self.namespace, self.name)
        assert document is not None, f"{self.name} is gone"
        return document

    def patch(self, spec: dict[str, Any]) -> dict[str, Any]:
        return self.client.patch(SERVICE, self.namespace, self.name, {"spec": spec})

    def annotate(self, **orders: str) -> None:
        """Set annotations of outrider.dev."""
        annotations = {f"outrider.dev/{name}": value for name, value in orders.items()}
        self.client.patch(SERVICE, self.namespace, self.name, {"metadata": {"annotations": annotations}})

    def condition(self, kind: str) -> dict[str, Any]:
        return condition(self.read(), kind)

    def child(self, kind: ResourceKind, name: str | None = None) -> dict[str, Any]:
        document = self.client.get(kind, self.namespace, name or self.name)
        assert document is not None, f"{kind.kind} {name or self.name} is gone"
        return document

    def children(self, kind: ResourceKind, selector: str = "") -> list[dict[str, Any]]:
        return self.client.list(
            kind, self.namespace, ",".join(filter(None, [f"outrider.dev/service={self.name}", selector]))
        )

    def wait(self, kind: str, status: str, reason: str | None = None, words: str = "") -> dict[str, Any]:
        """Wait until the condition has the status (and the reason, and the words in its sentence), and return it."""

        def look() -> dict[str, Any] | None:
            seen = self.condition(kind)
            is_so = seen.get("status") == status and reason in (None, seen["reason"]) and words in seen["message"]
            return seen if is_so else None

        return self._wait_for(f"{self.name}: {kind}={status}/{reason} {words!r}", look)

    def wait_updated(self) -> dict[str, Any]:
        """Wait as CI does, until the current generation runs on every pod."""
        return self._wait_for(f"{self.name} to be up to date", self.updated)

    def _wait_for(self, what: str, look: Callable[[], T | None]) -> T:
        """Wait like `wait_for`. A failure shows the status and the pods."""
        try:
            return wait_for(what, look)
        except AssertionError as error:
            texts = [
                json.dumps(self.read().get("status"), indent=1),
                *(json.dumps(pod["status"]) for pod in self.pods()),
            ]
            raise AssertionError("\n".join([str(error), *texts])) from None

    def updated(self) -> dict[str, Any] | None:
        """The service, if Updated is True of its current generation."""
        document = self.read()
        updated = condition(document, "Updated")
        current = updated.get("observedGeneration") == document["metadata"]["generation"]
        return document if current and updated["status"] == "True" else None

    @property
    def revision(self) -> str:
        """Revision that the Deployment asks for."""
        labels: dict[str, str] = self.child(DEPLOYMENT)["spec"]["template"]["metadata"]["labels"]
        return labels["outrider.dev/revision"]

    def pods(self) -> list[dict[str, Any]]:
        """Serving pods that are not being deleted."""
        pods = self.children(POD, "outrider.dev/component=serving")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def ready_pods(self) -> list[dict[str, Any]]:
        return [pod for pod in self.pods() if is_ready(pod)]


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def uids(documents: list[dict[str, Any]]) -> set[str]:
    return {document["metadata"]["uid"] for document in documents}
