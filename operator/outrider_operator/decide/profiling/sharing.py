"""Leaving Jobs and profiles, which services share by an owner reference each."""

from __future__ import annotations

from collections.abc import Container, Iterable

from outrider_operator.decide.ownership import owner_uids
from outrider_operator.inbound.reading import is_being_deleted, name_of, text, uid_of
from outrider_operator.model import PROFILING, Identity, Object
from outrider_operator.plan import Adoption, Delete

MOST_OWNERS = 64
"""Of a shared object, which has room for so many. Further services use it all the same, and measure again once it went
with the last of these."""


def joins(document: Object, owner: Identity) -> bool:
    """Is `owner` to add itself to the owners of `document`?"""
    uids = owner_uids(document)
    return owner.uid not in uids and len(uids) < MOST_OWNERS


def leave(
    kind: str, documents: Iterable[Object], used: Container[str], owner: Identity
) -> tuple[tuple[Adoption, ...], tuple[Delete, ...]]:
    """What `owner` does about the documents whose names are not `used`: the last user deletes, the others take their
    name off.

    Both are of the version that was seen: of two that leave in one moment the second looks again, and deletes.
    """
    left = [
        document
        for document in documents
        if name_of(document) not in used and owner.uid in owner_uids(document) and not is_being_deleted(document)
    ]
    alone = [document for document in left if owner_uids(document) == {owner.uid}]
    releases = tuple(_release(kind, document, owner) for document in left if document not in alone)
    return releases, tuple(deletion(kind, document) for document in alone)


def deletion(kind: str, document: Object) -> Delete:
    """Of `document` as it was seen: one that changed meanwhile may have got a user, or hold a result."""
    version = text(document, "metadata", "resourceVersion")
    return Delete(kind, name_of(document), uid_of(document), version, PROFILING)


def _release(kind: str, document: Object, owner: Identity) -> Adoption:
    version = text(document, "metadata", "resourceVersion")
    return Adoption(kind, name_of(document), uid_of(document), {"$patch": "delete", "uid": owner.uid}, version)
