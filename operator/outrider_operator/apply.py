"""Carries out a plan's changes to children: the only module that writes objects other than the status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from outrider_crds.base import digest

from outrider_operator.cache import Cache
from outrider_operator.kinds import POD, Kind, child_kind, kind_of, name_of, namespace_of
from outrider_operator.kubernetes_api import ApiError, KubernetesApi
from outrider_operator.model import (
    MANAGED_BY_LABEL,
    MANAGER,
    Adoption,
    Annotate,
    Delete,
    Object,
    Plan,
    Rejection,
)

logger = logging.getLogger(__name__)

RETRY_REFUSED_S = 60.0
"""A refused object is sent again after this time: a quota may have been raised, a policy changed."""


class ObserveAgain(Exception):  # noqa: N818 - no error, a reason to look once more
    """The object changed since it was observed: decide again on what is there now."""


@dataclass(frozen=True)
class _Refusal:
    document: str
    """Digest of what was refused."""
    at: float
    rejection: Rejection


class Applier:
    def __init__(self, api: KubernetesApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache
        self._refusals: dict[tuple[str, str, str], _Refusal] = {}

    async def carry_out(self, plan: Plan, namespace: str) -> tuple[Rejection, ...]:
        """Returns the children that the API server refused. Raises ObserveAgain, ApiError or UNREACHABLE."""
        rejections = [await self._send(document, create=True) for document in plan.create]
        rejections += [await self._send(document, create=False) for document in plan.apply]
        rejections += [await _refusal(a.kind, a.name, self._adopt(a, namespace)) for a in plan.adopt]
        rejections += [await _refusal(POD.kind, a.pod, self._annotate(a, namespace)) for a in plan.annotate]
        rejections += [await _refusal(d.kind, d.name, self._delete(d, namespace)) for d in plan.delete]
        return tuple(rejection for rejection in rejections if rejection is not None)

    def forget(self, namespace: str, name: str) -> None:
        """Drop what is remembered of a deleted service's children."""
        for key in [key for key in self._refusals if key[1] == namespace and _belongs(key[2], name)]:
            del self._refusals[key]

    async def _send(self, document: Object, *, create: bool) -> Rejection | None:
        """Create or apply; an object that was refused as it is now is left for a while."""
        key, content = (document["kind"], namespace_of(document), name_of(document)), digest(document)
        refusal, now = self._refusals.get(key), asyncio.get_running_loop().time()
        if refusal is not None and refusal.document == content and now - refusal.at < RETRY_REFUSED_S:
            return refusal.rejection
        action = self._create(document) if create else self._apply(document)
        rejection = await _refusal(document["kind"], name_of(document), action)
        if rejection is None:
            self._refusals.pop(key, None)
        else:
            self._refusals[key] = _Refusal(content, now, rejection)
        return rejection

    async def _create(self, document: Object) -> None:
        kind, namespace, name = kind_of(document), namespace_of(document), name_of(document)
        try:
            created = await self._api.create(document)
        except ApiError as error:
            if not error.already_exists:
                raise
            existing = await self._api.get(kind, namespace, name)
            if existing is not None:
                self._remember(kind, existing)
            return
        logger.info("Created %s %s/%s", kind.kind, namespace, name)
        self._remember(kind, created)

    async def _apply(self, document: Object) -> None:
        kind, namespace, name = kind_of(document), namespace_of(document), name_of(document)
        try:
            applied = await self._api.apply(document)
        except ApiError as error:
            if error.conflict:
                raise ObserveAgain(error.message) from None
            raise
        logger.info("Applied %s %s/%s", kind.kind, namespace, name)
        self._remember(kind, applied)

    async def _adopt(self, adoption: Adoption, namespace: str) -> None:
        metadata = {"name": adoption.name, "uid": adoption.uid, "ownerReferences": [adoption.owner]}
        await self._patch(child_kind(adoption.kind), namespace, metadata)

    async def _annotate(self, annotate: Annotate, namespace: str) -> None:
        metadata = {"name": annotate.pod, "uid": annotate.uid, "annotations": dict(annotate.annotations)}
        await self._patch(POD, namespace, metadata)

    async def _patch(self, kind: Kind, namespace: str, metadata: Object) -> None:
        """Patch the metadata of exactly the object that was observed; one that went meanwhile is fine."""
        patch = _document(kind, namespace, metadata)
        try:
            self._remember(kind, await self._api.patch(patch))
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            logger.info("%s %s/%s changed before it was patched", kind.kind, namespace, metadata["name"])

    async def _delete(self, delete: Delete, namespace: str) -> None:
        kind = child_kind(delete.kind)
        document = _document(kind, namespace, {"name": delete.name, "uid": delete.uid})
        preconditions = {"uid": delete.uid}
        if delete.resource_version is not None:
            preconditions["resourceVersion"] = delete.resource_version
        try:
            leaving = await self._api.delete(document, preconditions)
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            return
        logger.info("Deleted %s %s/%s", kind.kind, namespace, delete.name)
        if leaving is None:
            self._cache.wrote_deletion(kind, document)
        else:
            self._cache.wrote(kind, leaving)

    def _remember(self, kind: Kind, document: Object) -> None:
        """Into the cache, if the watch (which selects by label) will keep it up to date there."""
        if (document["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == MANAGER:
            self._cache.wrote(kind, document)


async def _refusal(kind: str, name: str, action: Coroutine[None, None, None]) -> Rejection | None:
    """Do it; an object that the API server refuses for what is in it must not keep the status from being written."""
    try:
        await action
    except ApiError as error:
        if not error.rejected:
            raise
        logger.warning("%s %s was refused: %s", kind, name, error.message)
        return Rejection(kind, name, error.message)
    return None


def _document(kind: Kind, namespace: str, metadata: Object) -> Object:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"namespace": namespace, **metadata},
    }


def _belongs(child: str, service: str) -> bool:
    return child == service or child.startswith(f"{service}-")
