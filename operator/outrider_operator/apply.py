"""Carries out a plan's changes to children: the only module that writes objects other than the status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial

from outrider_operator.cache import Cache
from outrider_operator.decide.drift import difference
from outrider_operator.inbound.objects import admit
from outrider_operator.inbound.reading import component, label, name_of, namespace_of, uid_of
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.kinds import POD, Kind, child_kind, kind_of
from outrider_operator.kubernetes_api import UNREACHABLE, ApiError, KubernetesApi
from outrider_operator.managed_fields import claimed
from outrider_operator.model import (
    COMPONENT_LABEL,
    FIELD_MANAGER,
    MANAGED_BY_LABEL,
    MANAGER,
    PROFILE,
    PROFILING,
    SERVICE_LABEL,
    SHARED_PROFILE,
    Object,
    Rejection,
)
from outrider_operator.plan import Adoption, Annotate, Delete, Plan, Write, component_of, fingerprint

logger = logging.getLogger(__name__)


class ObserveAgain(Exception):  # noqa: N818 - no error, a reason to look once more
    """The object changed since it was observed: decide again on what is there now."""


@dataclass(frozen=True)
class Outcome:
    """What became of a plan."""

    refused: tuple[Rejection, ...]
    """The writes that the API server refused, or stored otherwise than they were sent."""
    stopped: Exception | None = None
    """Why the rest was not tried: ObserveAgain, ApiError or one of UNREACHABLE."""


Action = Callable[[], Coroutine[None, None, str]]
"""Returns where what is stored then parts from what was sent; empty where it does not."""


class Applier:
    def __init__(self, api: KubernetesApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def carry_out(self, plan: Plan, namespace: str, *, patient: bool = True) -> Outcome:
        """Write after write, until one gets no answer. `patient`: an API server that is busy refuses nothing."""
        refused: list[Rejection] = []
        try:
            for write, kind, name, action in self._actions(plan, namespace):
                if (answer := await _answer(write, kind, name, action(), patient=patient)) is not None:
                    refused.append(answer)
        except (ObserveAgain, ApiError, *UNREACHABLE) as error:
            return Outcome(tuple(refused), error)
        return Outcome(tuple(refused))

    def _actions(self, plan: Plan, namespace: str) -> Iterator[tuple[Write, str, str, Action]]:
        """(write, kind, name, what does it), in the plan's order."""
        for document in plan.create:
            yield document, document["kind"], name_of(document), partial(self._create, document)
        for document in plan.apply:
            yield document, document["kind"], name_of(document), partial(self._apply, document)
        for adoption in plan.adopt:
            yield adoption, adoption.kind, adoption.name, partial(self._adopt, adoption, namespace)
        for mark in plan.annotate:
            yield mark, POD.kind, mark.pod, partial(self._annotate, mark, namespace)
        for delete in plan.delete:
            yield delete, delete.kind, delete.name, partial(self._delete, delete, delete.namespace or namespace)

    async def _create(self, document: Object) -> str:
        """Never touches an object that is there already: one that decisions see is only taken note of."""
        kind, namespace, name = kind_of(document), namespace_of(document), name_of(document)
        try:
            created = await self._api.create(document)
        except ApiError as error:
            existing = await self._api.get(kind, namespace, name) if error.already_exists else None
            if existing is None or not _is_seen(kind, existing, document):
                raise
            self._remember(kind, existing)
            if self._cache.get(kind, namespace, name) is None:  # its namespace has too many
                raise
            return ""
        logger.info("Created %s %s/%s", kind.kind, namespace, name)
        self._remember(kind, created)
        return _rewritten(created, document) if document.get("immutable") else ""  # another is applied, if need be

    async def _apply(self, document: Object) -> str:
        """Applies to the object with the document's uid and to no other: one that took its name is left alone."""
        kind, namespace, name = kind_of(document), namespace_of(document), name_of(document)
        live = await self._api.get(kind, namespace, name)
        if live is None or uid_of(live) != uid_of(document):
            raise ObserveAgain(f"{kind.kind} {namespace}/{name} is another one by now")
        claimed = await self._claim(kind, live)
        applied = await self._api.apply(_following(document, live, claimed))
        logger.info("Applied %s %s/%s", kind.kind, namespace, name)
        self._remember(kind, applied)
        return _rewritten(applied, document)

    async def _claim(self, kind: Kind, live: Object) -> Object:
        """What this operator created it may also take away: once in the life of an object. Returns it as it is then."""
        fields = claimed(live["metadata"].get("managedFields") or [], FIELD_MANAGER)
        if fields is None:
            return live
        names = ("name", "namespace", "uid", "resourceVersion")
        metadata = {**{name: live["metadata"][name] for name in names}, "managedFields": fields}
        try:
            return await self._api.patch(_document(kind, namespace_of(live), metadata))
        except ApiError as error:
            if error.not_found or error.conflict:
                raise ObserveAgain(f"{kind.kind} {name_of(live)} changed meanwhile") from None
            raise

    async def _adopt(self, adoption: Adoption, namespace: str) -> str:
        metadata: Object = {"name": adoption.name, "uid": adoption.uid, "ownerReferences": [adoption.owner]}
        if adoption.resource_version is not None:
            metadata["resourceVersion"] = adoption.resource_version
        return await self._patch(child_kind(adoption.kind), namespace, metadata)

    async def _annotate(self, annotate: Annotate, namespace: str) -> str:
        metadata = {"name": annotate.pod, "uid": annotate.uid, "annotations": dict(annotate.annotations)}
        return await self._patch(POD, namespace, metadata)

    async def _patch(self, kind: Kind, namespace: str, metadata: Object) -> str:
        """Patch the metadata of exactly the object that was observed; one that went meanwhile is fine."""
        patch = _document(kind, namespace, metadata)
        try:
            patched = await self._api.patch(patch)
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            logger.info("%s %s/%s changed before it was patched", kind.kind, namespace, metadata["name"])
            return ""
        self._remember(kind, patched)
        return _rewritten(patched, patch)

    async def _delete(self, delete: Delete, namespace: str) -> str:
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
            return ""
        logger.info("Deleted %s %s/%s", kind.kind, namespace, delete.name)
        if leaving is None:
            self._cache.wrote_deletion(kind, document)
        else:
            self._cache.wrote(kind, leaving)
        return ""

    def _remember(self, kind: Kind, document: Object) -> None:
        """Into the cache, if the watch (which selects by label) will keep it up to date there."""
        if label(document, MANAGED_BY_LABEL) == MANAGER:
            self._cache.wrote(kind, document)


async def _answer(
    write: Write, kind: str, name: str, action: Coroutine[None, None, str], *, patient: bool
) -> Rejection | None:
    """Do it. Whatever the API server has against it (but that it is busy for a moment) must neither keep the status
    from being written nor the other writes from being made."""
    try:
        rewritten = await action
    except ApiError as error:
        if error.namespace_ends or (error.busy and patient):
            raise
        if error.conflict:  # with a writer of the object, or of the quota that counts it
            raise ObserveAgain(error.message) from None
        logger.warning("%s %s was refused: %s", kind, name, error)
        return Rejection(kind, name, component_of(write), error.message or str(error), fingerprint(write))
    if rewritten:
        logger.warning("%s %s is stored otherwise than it was sent: %s", kind, name, rewritten)
        return Rejection(kind, name, component_of(write), rewritten, fingerprint(write), is_stored=True)
    return None


def _rewritten(stored: Object, sent: Object) -> str:
    """Where admission changed what was sent. Sent again and again it would change nothing, as fast as writes go."""
    metadata = {name: value for name, value in sent["metadata"].items() if name != "resourceVersion"}
    owners = [owner for owner in metadata.get("ownerReferences", ()) if "$patch" not in owner]
    return difference(stored, {**sent, "metadata": {**metadata, "ownerReferences": owners}})


def _is_seen(kind: Kind, existing: Object, document: Object) -> bool:
    """True when decisions will find `existing` in the place of `document`, made by Outrider for whichever service.

    They look for a service's children by its label, and for Jobs and profiles, which services share, by the component.
    """
    shared = component(document) in (PROFILING, PROFILE, SHARED_PROFILE)
    names = (MANAGED_BY_LABEL, COMPONENT_LABEL, *(() if shared else (SERVICE_LABEL,)))
    labelled = all(label(existing, name) == label(document, name) for name in names)
    return labelled and not isinstance(admit(kind, existing), Unfit)


def _following(document: Object, decided_on: Object, claimed: Object) -> Object:
    """`document` for the version that came of a claim, where it names the one before that: nothing else changed."""
    version, known = document["metadata"].get("resourceVersion"), decided_on["metadata"]["resourceVersion"]
    if version is None or version != known:
        return document
    return {**document, "metadata": {**document["metadata"], "resourceVersion": claimed["metadata"]["resourceVersion"]}}


def _document(kind: Kind, namespace: str, metadata: Object) -> Object:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"namespace": namespace, **metadata},
    }
