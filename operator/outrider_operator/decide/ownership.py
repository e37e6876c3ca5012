"""Which objects belong to a service, and what every object of Outrider carries."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from outrider_crds.spec import API_GROUP, API_VERSION, KIND

from outrider_operator.decide.reading import is_being_deleted, items, label, text
from outrider_operator.model import (
    COMPONENT_LABEL,
    MANAGED_BY_LABEL,
    MANAGER,
    SERVICE_LABEL,
    SERVING,
    Object,
    Observed,
)


class Ownership(Enum):
    ABSENT = "absent"
    OURS = "ours"
    LEAVING = "leaving"
    """Being deleted, or left by a deleted service of this name: garbage collection takes it, then it is made anew."""
    FOREIGN = "foreign"


def ownership(document: Object | None, observed: Observed) -> Ownership:
    """Whose object that is. One without an owner is ours only if it carries our labels (an orphaned child)."""
    if document is None:
        return Ownership.ABSENT
    if is_being_deleted(document):
        return Ownership.LEAVING
    owner = next((ref for ref in items(document, "metadata", "ownerReferences") if ref.get("controller")), None)
    if owner is None:
        return Ownership.OURS if _has_our_labels(document, observed.name) else Ownership.FOREIGN
    if owner.get("uid") == observed.uid:
        return Ownership.OURS
    same_name = owner.get("kind") == KIND and owner.get("name") == observed.name
    return Ownership.LEAVING if same_name and text(owner, "apiVersion").startswith(API_GROUP) else Ownership.FOREIGN


def controller_name(document: Object) -> str:
    """ "Kind name" of the object's controller, for a sentence; empty when it has none."""
    refs = items(document, "metadata", "ownerReferences")
    return next((f"{text(ref, 'kind')} {text(ref, 'name')}" for ref in refs if ref.get("controller")), "")


def owner_reference(observed: Observed, *, controller: bool) -> Object:
    """Without blockOwnerDeletion: a service must be deletable whatever state its children are in."""
    reference: Object = {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": KIND,
        "name": observed.name,
        "uid": observed.uid,
    }
    return reference | ({"controller": True} if controller else {})


def owner_uids(document: Object) -> set[str]:
    return {text(ref, "uid") for ref in items(document, "metadata", "ownerReferences")}


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


def conflicts(observed: Observed, names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(kind, name) of the objects that stand where a child should and belong to someone else."""
    return [key for key in names if ownership(observed.children.get(key), observed) is Ownership.FOREIGN]


def _has_our_labels(document: Object, service: str) -> bool:
    return label(document, MANAGED_BY_LABEL) == MANAGER and label(document, SERVICE_LABEL) == service
