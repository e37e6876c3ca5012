"""Jobs and profiles that services share. Each service that uses one adds an owner reference."""

from __future__ import annotations

from collections.abc import Container, Iterable

from outrider_operator.cluster_model import PROFILING, Object, ServiceIdentity
from outrider_operator.decide.ownership import owner_uids
from outrider_operator.plan import Adoption, Delete
from outrider_operator.validation.reading import is_being_deleted, name_of, text, uid_of

MAX_OWNERS = 64
"""Owner references per shared object. Further services use it but do not keep it alive: when the last owner is gone,
they measure again."""


def joins(document: Object, owner: ServiceIdentity) -> bool:
    """Should `owner` add itself to the owners of `document`?"""
    uids = owner_uids(document)
    return owner.uid not in uids and len(uids) < MAX_OWNERS


def leave(
    kind: str, documents: Iterable[Object], used: Container[str], owner: ServiceIdentity
) -> tuple[tuple[Adoption, ...], tuple[Delete, ...]]:
    """Release the documents whose names are not in `used`: the last owner deletes, others remove their reference.

    Both writes carry the version that was read: if two services release at once, the second retries and deletes.
    """
    unneeded = [
        document
        for document in documents
        if name_of(document) not in used and owner.uid in owner_uids(document) and not is_being_deleted(document)
    ]
    unshared = [document for document in unneeded if owner_uids(document) == {owner.uid}]
    releases = tuple(_release(kind, document, owner) for document in unneeded if document not in unshared)
    return releases, tuple(deletion(kind, document) for document in unshared)


def deletion(kind: str, document: Object, component: str = PROFILING) -> Delete:
    """Delete the version of `document` that was read: a newer one may have a new owner or a result."""
    version = text(document, "metadata", "resourceVersion")
    return Delete(kind, name_of(document), uid_of(document), version, component)


def _release(kind: str, document: Object, owner: ServiceIdentity) -> Adoption:
    version = text(document, "metadata", "resourceVersion")
    return Adoption(kind, name_of(document), uid_of(document), {"$patch": "delete", "uid": owner.uid}, version)
