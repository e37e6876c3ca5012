"""Kubernetes objects as the API server sends them, for tests of the operator's edge."""

from __future__ import annotations

from typing import Any

from outrider_operator import cluster_model

OWNER = {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeService", "name": "chat", "uid": "chat-uid"}


def document(name: str, version: int, namespace: str = "ns", uid: str = "uid", **body: Any) -> dict[str, Any]:
    """An object of a service of that name."""
    metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": labels(name), "ownerReferences": [OWNER]}, **body}


def labels(service: str | None = "chat", component: str = cluster_model.SERVING) -> dict[str, str]:
    ours = {cluster_model.MANAGED_BY_LABEL: cluster_model.MANAGER, cluster_model.COMPONENT_LABEL: component}
    return ours | ({cluster_model.SERVICE_LABEL: service} if service is not None else {})


def owned_by(kind: str, uid: str) -> list[dict[str, Any]]:
    groups = {"Job": "batch/v1", "Pod": "v1", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}
    group = groups.get(kind, "apps/v1")
    return [{"apiVersion": group, "kind": kind, "name": uid, "uid": uid, "controller": True}]


def deployment(service: str = "chat") -> dict[str, Any]:
    return document(service, 1, uid=f"{service}-deployment")


def replica_set(service: str = "chat", version: int = 1) -> dict[str, Any]:
    result = document(f"{service}-rs", version, uid=f"{service}-rs", spec={"replicas": 1})
    result["metadata"] |= {
        "labels": labels(service),
        "ownerReferences": owned_by("Deployment", f"{service}-deployment"),
    }
    return result


def stateful_set(name: str = "chat-nodes", owner: str = "LeaderWorkerSet", version: int = 1) -> dict[str, Any]:
    """A StatefulSet of a LeaderWorkerSet, without a label of ours: it makes leaders, or the workers of one."""
    by = "chat-nodes" if owner == "LeaderWorkerSet" else name
    result = document(name, version, uid=f"{name}-{owner}", spec={"replicas": 1})
    result["metadata"] |= {"labels": {cluster_model.GROUPS_LABEL: "chat-nodes"}, "ownerReferences": owned_by(owner, by)}
    return result


def pod(
    name: str,
    version: int = 1,
    *,
    service: str | None = "chat",
    owner: str | None = "chat-rs",
    address: str = "127.0.0.1",
    ready: bool = True,
    node: str = "node",
) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    spec: dict[str, Any] = {"containers": []} | ({"nodeName": node} if node else {})
    result = document(name, version, uid=name, spec=spec, status={"podIP": address, "conditions": [condition]})
    result["metadata"]["labels"] = labels(service)
    result["metadata"]["ownerReferences"] = owned_by("ReplicaSet", owner) if owner is not None else []
    return result
