"""Decide which objects belong to a service; labels and owner references of Outrider's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outrider_crds.spec import API_GROUP, API_VERSION, KIND

from outrider_operator import cluster_model
from outrider_operator.cluster_model import Object, ServiceIdentity
from outrider_operator.kinds import child_kind
from outrider_operator.validation import reading


class Ownership(Enum):
    ABSENT = "absent"
    OURS = "ours"
    TERMINATING = "terminating"
    """Being deleted, or owned by a deleted service of this name. Garbage collection removes it, then it returns."""
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Children:
    """Objects with the names of a service's children, including objects of other owners."""

    owner: ServiceIdentity
    documents: Mapping[tuple[str, str], Object]
    """(kind, name) -> object."""
    over_nodes: bool = False
    """Does the spec ask for groups of pods (engine.nodes above 1)?"""

    def ownership(self, kind: str, name: str) -> Ownership:
        return ownership(self.documents.get((kind, name)), self.owner)

    def own(self, kind: str, name: str) -> Object | None:
        """The child; None if there is none, or if it belongs to another owner."""
        return self.documents.get((kind, name)) if self.ownership(kind, name) is Ownership.OURS else None

    @property
    def deployment(self) -> Object | None:
        return self.own(cluster_model.DEPLOYMENT, self.owner.name)

    @property
    def groups(self) -> Object | None:
        """The LeaderWorkerSet in the shape of a Deployment of its leaders."""
        groups = self.own(cluster_model.LEADER_WORKER_SET, cluster_model.groups_name(self.owner.name))
        return groups and _as_deployment(groups)

    @property
    def workload(self) -> Object | None:
        """What makes the serving pods. While both kinds exist, it is the one that the spec asks for."""
        return (self.groups or self.deployment) if self.over_nodes else (self.deployment or self.groups)

    @property
    def workloads(self) -> list[Object]:
        """Both kinds, while a service changes from one to the other."""
        return [workload for workload in (self.deployment, self.groups) if workload is not None]

    @property
    def canary(self) -> Object | None:
        """Deployment of the draft canary."""
        return self.own(cluster_model.DEPLOYMENT, cluster_model.canary_name(self.owner.name))

    @property
    def are_reachable(self) -> bool:
        """Does a Kubernetes Service select the pods? One that is being deleted still does."""
        return self.ownership(cluster_model.KUBERNETES_SERVICE, self.owner.name) in (
            Ownership.OURS,
            Ownership.TERMINATING,
        )

    @property
    def has_account(self) -> bool:
        """Is there a ServiceAccount of the service's name: its own, or the one that podTemplate names?"""
        return self.ownership(cluster_model.SERVICE_ACCOUNT, self.owner.name) in (Ownership.OURS, Ownership.FOREIGN)

    @property
    def config_maps(self) -> list[Object]:
        """The ConfigMaps that the service owns."""
        keys = [(kind, name) for kind, name in self.documents if kind == cluster_model.CONFIG_MAP]
        return [child for key in keys if (child := self.own(*key)) is not None]

    def terminating(self, names: Iterable[tuple[str, str]]) -> list[Object]:
        """Objects that must be gone before a child of the same name can be created."""
        return [self.documents[key] for key in names if self.ownership(*key) is Ownership.TERMINATING]

    def foreign(self, names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """(kind, name) of children whose name an object of another owner has."""
        return [key for key in names if self.ownership(*key) is Ownership.FOREIGN]


def _as_deployment(groups: Object) -> Object:
    """A LeaderWorkerSet in the shape of a Deployment, so that what is decided about pods holds for groups.

    A group is ready as its leader is. Releases before 0.9 do not say which generation they observed.
    """
    status, generation = reading.mapping(groups, "status"), reading.integer(groups, "metadata", "generation")
    return {
        **groups,
        "spec": {
            "replicas": reading.integer(groups, "spec", "replicas"),
            "template": reading.mapping(groups, "spec", "leaderWorkerTemplate", "leaderTemplate"),
        },
        "status": {
            "observedGeneration": generation if status else 0,
            **status,
            "availableReplicas": reading.integer(status, "readyReplicas"),
        },
    }


def ownership(document: Object | None, owner: ServiceIdentity) -> Ownership:
    """Ownership of `document`. Without an owner reference it is the service's if it has its labels (orphaned child)."""
    if document is None:
        return Ownership.ABSENT
    if reading.is_being_deleted(document):
        return Ownership.TERMINATING
    controller = reading.controller_of(document)
    if not controller:
        return Ownership.OURS if _has_our_labels(document, owner.name) else Ownership.FOREIGN
    if controller.get("uid") == owner.uid:
        return Ownership.OURS
    same_name = (controller.get("kind"), controller.get("name")) == (KIND, owner.name)
    is_orphan = same_name and reading.text(controller, "apiVersion").startswith(API_GROUP)
    return Ownership.TERMINATING if is_orphan else Ownership.FOREIGN


def controller_name(document: Object) -> str:
    """Text "Kind name" of the object's controller; empty if it has none."""
    controller = reading.controller_of(document)
    return f"{reading.text(controller, 'kind')} {reading.text(controller, 'name')}" if controller else ""


def owner_reference(owner: ServiceIdentity, *, controller: bool) -> Object:
    """Owner reference without blockOwnerDeletion: a service can be deleted whatever state its children are in."""
    reference: Object = {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
    }
    return reference | ({"controller": True} if controller else {})


def child_document(
    owner: ServiceIdentity,
    kind: str,
    name: str,
    *,
    more_labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **fields: Any,
) -> Object:
    """Manifest of a child of `owner`, its controller. fields: all others than kind and metadata."""
    metadata: Object = {
        "name": name,
        "namespace": owner.namespace,
        "labels": {**labels(owner.name), **(more_labels or {})},
        **({"annotations": dict(annotations)} if annotations else {}),
        "ownerReferences": [owner_reference(owner, controller=True)],
    }
    return {"apiVersion": child_kind(kind).api_version, "kind": kind, "metadata": metadata, **fields}


def owner_uids(document: Object) -> set[str]:
    return {reading.text(owner, "uid") for owner in reading.owners_of(document)}


def labels(service: str, component: str = cluster_model.SERVING) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "outrider",
        "app.kubernetes.io/instance": service,
        cluster_model.MANAGED_BY_LABEL: cluster_model.MANAGER,
        cluster_model.SERVICE_LABEL: service,
        cluster_model.COMPONENT_LABEL: component,
    }


def selector(service: str) -> dict[str, str]:
    """Labels that select the serving pods; a Deployment's selector can never change."""
    return {
        "app.kubernetes.io/name": "outrider",
        cluster_model.SERVICE_LABEL: service,
        cluster_model.COMPONENT_LABEL: cluster_model.SERVING,
    }


def _has_our_labels(document: Object, service: str) -> bool:
    return (
        reading.label(document, cluster_model.MANAGED_BY_LABEL) == cluster_model.MANAGER
        and reading.label(document, cluster_model.SERVICE_LABEL) == service
    )
