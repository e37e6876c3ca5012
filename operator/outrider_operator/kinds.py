"""The Kubernetes kinds that the operator reads or writes, and their paths in the API."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.spec import API_GROUP, API_VERSION, KIND, PLURAL

from outrider_operator.cluster_model import Object


@dataclass(frozen=True)
class ResourceKind:
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of an object; without `name` of a collection, and without `namespace` of that in all namespaces."""
        parts = ["apis" if self.group else "api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(parts)


SERVICE = ResourceKind(API_GROUP, API_VERSION, PLURAL, KIND)
DEPLOYMENT = ResourceKind("apps", "v1", "deployments", "Deployment")
REPLICA_SET = ResourceKind("apps", "v1", "replicasets", "ReplicaSet")
JOB = ResourceKind("batch", "v1", "jobs", "Job")
POD = ResourceKind("", "v1", "pods", "Pod")
CONFIG_MAP = ResourceKind("", "v1", "configmaps", "ConfigMap")
KUBERNETES_SERVICE = ResourceKind("", "v1", "services", "Service")
SERVICE_ACCOUNT = ResourceKind("", "v1", "serviceaccounts", "ServiceAccount")
DISRUPTION_BUDGET = ResourceKind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY = ResourceKind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
NODE = ResourceKind("", "v1", "nodes", "Node", namespaced=False)
EVENT = ResourceKind("", "v1", "events", "Event")
LEASE = ResourceKind("coordination.k8s.io", "v1", "leases", "Lease")
STATEFUL_SET = ResourceKind("apps", "v1", "statefulsets", "StatefulSet")
LEADER_WORKER_SET = ResourceKind("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
INFERENCE_POOL = ResourceKind("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")

CHILDREN = (
    DEPLOYMENT, REPLICA_SET, JOB, POD, CONFIG_MAP, KUBERNETES_SERVICE, SERVICE_ACCOUNT, DISRUPTION_BUDGET,
    NETWORK_POLICY, STATEFUL_SET,
)  # fmt: skip
UNWATCHED_CHILDREN = (INFERENCE_POOL, LEADER_WORKER_SET)
"""Kinds of other projects, which may not be installed: read where a service asks for one."""
WATCHED_BY_METADATA = frozenset({CONFIG_MAP})
"""Kinds that are watched without contents, which may be a megabyte. Contents are read when a decision needs them."""
_BY_API_VERSION = {
    (kind.api_version, kind.kind): kind for kind in (*CHILDREN, *UNWATCHED_CHILDREN, SERVICE, NODE, LEASE, EVENT)
}
_BY_NAME = {kind.kind: kind for kind in (*CHILDREN, *UNWATCHED_CHILDREN)}


def kind_of(document: Object) -> ResourceKind:
    """The kind of `document`. Raises KeyError for an unknown kind."""
    return _BY_API_VERSION[document["apiVersion"], document["kind"]]


def child_kind(name: str) -> ResourceKind:
    """The kind of children with this name, such as "Deployment"."""
    return _BY_NAME[name]
