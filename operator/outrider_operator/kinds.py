"""The Kubernetes kinds that the operator reads or writes, and their addresses in the API."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.spec import API_GROUP, API_VERSION, KIND, PLURAL

from outrider_operator.model import Object


@dataclass(frozen=True)
class Kind:
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of an object, or of the collection where `name` is absent (of all namespaces without one)."""
        parts = ["apis" if self.group else "api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(parts)


SERVICE = Kind(API_GROUP, API_VERSION, PLURAL, KIND)
DEPLOYMENT = Kind("apps", "v1", "deployments", "Deployment")
REPLICA_SET = Kind("apps", "v1", "replicasets", "ReplicaSet")
JOB = Kind("batch", "v1", "jobs", "Job")
POD = Kind("", "v1", "pods", "Pod")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
KUBERNETES_SERVICE = Kind("", "v1", "services", "Service")
SERVICE_ACCOUNT = Kind("", "v1", "serviceaccounts", "ServiceAccount")
DISRUPTION_BUDGET = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
NODE = Kind("", "v1", "nodes", "Node", namespaced=False)
EVENT = Kind("", "v1", "events", "Event")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")

CHILDREN = (
    DEPLOYMENT, REPLICA_SET, JOB, POD, CONFIG_MAP, KUBERNETES_SERVICE, SERVICE_ACCOUNT, DISRUPTION_BUDGET,
    NETWORK_POLICY,
)  # fmt: skip
WATCHED_BY_METADATA = frozenset({CONFIG_MAP})
"""Kinds that anyone may fill with a megabyte each: of those the contents are read that a decision needs."""
_BY_API_VERSION = {(kind.api_version, kind.kind): kind for kind in (*CHILDREN, SERVICE, NODE, LEASE, EVENT)}
_BY_NAME = {kind.kind: kind for kind in CHILDREN}


def kind_of(document: Object) -> Kind:
    """The kind of `document`. Raises KeyError for one that the operator does not know."""
    return _BY_API_VERSION[document["apiVersion"], document["kind"]]


def child_kind(name: str) -> Kind:
    """The kind of children that is called `name` ("Deployment")."""
    return _BY_NAME[name]
