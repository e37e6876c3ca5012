"""Which objects belong to a service, and what every object of Outrider carries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from outrider_crds.spec import API_GROUP, API_VERSION, KIND

from outrider_operator.inbound.reading import controller_of, is_being_deleted, label, owners_of, text
from outrider_operator.model import (
    COMPONENT_LABEL,
    CONFIG_MAP,
    DEPLOYMENT,
    KUBERNETES_SERVICE,
    MANAGED_BY_LABEL,
    MANAGER,
    SERVICE_LABEL,
    SERVING,
    Identity,
    Object,
    canary_name,
)


class Ownership(Enum):
    ABSENT = "absent"
    OURS = "ours"
    LEAVING = "leaving"
    """Being deleted, or left by a deleted service of this name: garbage collection takes it, then it is made anew."""
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Children:
    """The objects under the names of a service's children, whoever owns them."""

    owner: Identity
    documents: Mapping[tuple[str, str], Object]
    """(kind, name) -> object."""

    def ownership(self, kind: str, name: str) -> Ownership:
        return ownership(self.documents.get((kind, name)), self.owner)

    def own(self, kind: str, name: str) -> Object | None:
        """The child; None where there is none, or one that is not the service's."""
        return self.documents.get((kind, name)) if self.ownership(kind, name) is Ownership.OURS else None

    @property
    def deployment(self) -> Object | None:
        return self.own(DEPLOYMENT, self.owner.name)

    @property
    def canary(self) -> Object | None:
        """Deployment of the draft canary."""
        return self.own(DEPLOYMENT, canary_name(self.owner.name))

    @property
    def are_reachable(self) -> bool:
        """Does a Service lead to the pods? One that is about to go still does."""
        return self.ownership(KUBERNETES_SERVICE, self.owner.name) in (Ownership.OURS, Ownership.LEAVING)

    @property
    def config_maps(self) -> list[Object]:
        """The service's own."""
        keys = [(kind, name) for kind, name in self.documents if kind == CONFIG_MAP]
        return [child for key in keys if (child := self.own(*key)) is not None]

    def leaving(self, names: Iterable[tuple[str, str]]) -> list[Object]:
        """The objects that stand where a child should, and go before it can be made."""
        return [self.documents[key] for key in names if self.ownership(*key) is Ownership.LEAVING]

    def foreign(self, names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """(kind, name) of the objects that stand where a child should and belong to someone else."""
        return [key for key in names if self.ownership(*key) is Ownership.FOREIGN]


def ownership(document: Object | None, owner: Identity) -> Ownership:
    """Whose object that is. One without an owner is the service's only if it carries its labels (an orphaned child)."""
    if document is None:
        return Ownership.ABSENT
    if is_being_deleted(document):
        return Ownership.LEAVING
    controller = controller_of(document)
    if not controller:
        return Ownership.OURS if _has_our_labels(document, owner.name) else Ownership.FOREIGN
    if controller.get("uid") == owner.uid:
        return Ownership.OURS
    same_name = (controller.get("kind"), controller.get("name")) == (KIND, owner.name)
    left = same_name and text(controller, "apiVersion").startswith(API_GROUP)
    return Ownership.LEAVING if left else Ownership.FOREIGN


def controller_name(document: Object) -> str:
    """ "Kind name" of the object's controller, for a sentence; empty when it has none."""
    controller = controller_of(document)
    return f"{text(controller, 'kind')} {text(controller, 'name')}" if controller else ""


def owner_reference(owner: Identity, *, controller: bool) -> Object:
    """Without blockOwnerDeletion: a service must be deletable whatever state its children are in."""
    reference: Object = {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": KIND,
        "name": owner.name,
        "uid": owner.uid,
    }
    return reference | ({"controller": True} if controller else {})


def owner_uids(document: Object) -> set[str]:
    return {text(owner, "uid") for owner in owners_of(document)}


def labels(service: str, component: str = SERVING) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "outrider",
        "app.kubernetes.io/instance": service,
        MANAGED_BY_LABEL: MANAGER,
        SERVICE_LABEL: service,
        COMPONENT_LABEL: component,
    }


def selector(service: str) -> dict[str, str]:
    """Labels that select the serving pods; a Deployment's selector can never change."""
    return {"app.kubernetes.io/name": "outrider", SERVICE_LABEL: service, COMPONENT_LABEL: SERVING}


def _has_our_labels(document: Object, service: str) -> bool:
    return label(document, MANAGED_BY_LABEL) == MANAGER and label(document, SERVICE_LABEL) == service
