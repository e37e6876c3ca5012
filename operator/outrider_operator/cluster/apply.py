"""Carry out the writes of a plan. No other module writes objects, except the status, Events and the Lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial

from outrider_operator import cluster_model
from outrider_operator.cluster.api_error import UNREACHABLE, ApiError
from outrider_operator.cluster.cache import ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster_model import Object
from outrider_operator.decide.drift import difference
from outrider_operator.kinds import CHILDREN, POD, ResourceKind, child_kind, kind_of
from outrider_operator.plan import Adoption, Delete, Plan, Write, component_of, fingerprint
from outrider_operator.validation.managed_fields import claimed
from outrider_operator.validation.objects import admit
from outrider_operator.validation.reading import InvalidInput, component, label, name_of, namespace_of, uid_of

logger = logging.getLogger(__name__)


class ObserveAgain(Exception):  # noqa: N818 - not an error, but a reason to observe and decide again
    """The object changed since it was observed, so the decision must be repeated."""


@dataclass(frozen=True)
class ApplyOutcome:
    """Result of carrying out a plan."""

    refused: tuple[cluster_model.ApiRefusal, ...]
    """Writes that the API server refused, or that admission changed."""
    stopped: Exception | None = None
    """Error that prevented the remaining writes: ObserveAgain, ApiError or one of UNREACHABLE."""


Action = Callable[[], Coroutine[None, None, str]]
"""Carries out one write. Returns a sentence about the field that admission changed; empty if it changed none."""


class Applier:
    def __init__(self, api: KubernetesApi, cache: ObjectCache) -> None:
        self._api = api
        self._cache = cache

    async def carry_out(self, plan: Plan, namespace: str, *, patient: bool = True) -> ApplyOutcome:
        """Carry out the writes one by one. patient: a busy API server stops the plan; else that counts as a refusal."""
        refused: list[cluster_model.ApiRefusal] = []
        try:
            for write, kind, name, action in self._actions(plan, namespace):
                if (answer := await _answer(write, kind, name, action(), patient=patient)) is not None:
                    refused.append(answer)
        except (ObserveAgain, ApiError, *UNREACHABLE) as error:
            return ApplyOutcome(tuple(refused), error)
        return ApplyOutcome(tuple(refused))

    def _actions(self, plan: Plan, namespace: str) -> Iterator[tuple[Write, str, str, Action]]:
        """(write, kind, name, action) in the plan's order."""
        for document in plan.create:
            yield document, document["kind"], name_of(document), partial(self._create, document)
        for document in plan.apply:
            yield document, document["kind"], name_of(document), partial(self._apply, document)
        for adoption in plan.adopt:
            patch = partial(self._patch, child_kind(adoption.kind), namespace, _adoption_metadata(adoption))
            yield adoption, adoption.kind, adoption.name, patch
        for mark in plan.annotate:
            metadata = {"name": mark.pod, "uid": mark.uid, "annotations": dict(mark.annotations)}
            yield mark, POD.kind, mark.pod, partial(self._patch, POD, namespace, metadata)
        for delete in plan.delete:
            yield delete, delete.kind, delete.name, partial(self._delete, delete, delete.namespace or namespace)

    async def _create(self, document: Object) -> str:
        """Create an object. One that exists already is left alone, and added to the cache if decisions can use it."""
        kind, namespace, name = kind_of(document), namespace_of(document), name_of(document)
        try:
            created = await self._api.create(document)
        except ApiError as error:
            existing = await self._api.get(kind, namespace, name) if error.already_exists else None
            if existing is None or not _is_seen(kind, existing, document):
                raise
            self._remember(kind, existing)
            return ""
        logger.info("Created %s %s/%s", kind.kind, namespace, name)
        self._remember(kind, created)
        return _rewritten(created, document) if document.get("immutable") else ""  # others are compared when applied

    async def _apply(self, document: Object) -> str:
        """Apply to the object with the document's uid. Another object of the same name is left alone."""
        kind, namespace, name = kind_of(document), namespace_of(document), name_of(document)
        live = await self._api.get(kind, namespace, name)
        if live is None or uid_of(live) != uid_of(document):
            raise ObserveAgain(f"{kind.kind} {namespace}/{name} was replaced by another object")
        owned = await self._claim(kind, live)
        applied = await self._api.apply(_following(document, live, owned))
        logger.info("Applied %s %s/%s", kind.kind, namespace, name)
        self._remember(kind, applied)
        return _rewritten(applied, document)

    async def _claim(self, kind: ResourceKind, live: Object) -> Object:
        """Let later applies remove fields that the create wrote. Needed once per object. Returns its new state."""
        fields = claimed(live["metadata"].get("managedFields") or [], cluster_model.FIELD_MANAGER)
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

    async def _patch(self, kind: ResourceKind, namespace: str, metadata: Object) -> str:
        """Patch the metadata of the object that was observed. It is no error if that object is gone."""
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
        version = {} if delete.resource_version is None else {"resourceVersion": delete.resource_version}
        try:
            terminating = await self._api.delete(document, {"uid": delete.uid, **version})
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            return ""
        logger.info("Deleted %s %s/%s", kind.kind, namespace, delete.name)
        if kind in CHILDREN and terminating is not None:
            self._cache.wrote(kind, terminating)
        elif kind in CHILDREN:
            self._cache.wrote_deletion(kind, document)
        return ""

    def _remember(self, kind: ResourceKind, document: Object) -> None:
        """Add the object to the cache, if the watch (which selects by label) will keep it up to date."""
        if kind in CHILDREN and label(document, cluster_model.MANAGED_BY_LABEL) == cluster_model.MANAGER:
            self._cache.wrote(kind, document)


async def _answer(
    write: Write, kind: str, name: str, action: Coroutine[None, None, str], *, patient: bool
) -> cluster_model.ApiRefusal | None:
    """Carry out one write. Returns its refusal, so that the other writes and the status are still written.

    Only a busy API server stops the plan.
    """
    try:
        rewritten = await action
    except ApiError as error:
        if error.namespace_ends or (error.busy and patient):
            raise
        if error.conflict:  # with another writer of the object, or of the quota that counts it
            raise ObserveAgain(error.message) from None
        logger.warning("%s %s was refused: %s", kind, name, error)
        return cluster_model.ApiRefusal(
            kind, name, component_of(write), error.message or str(error), fingerprint(write)
        )
    if rewritten:
        logger.warning("%s %s was changed by admission: %s", kind, name, rewritten)
        return cluster_model.ApiRefusal(kind, name, component_of(write), rewritten, fingerprint(write), is_stored=True)
    return None


def _rewritten(stored: Object, sent: Object) -> str:
    """A sentence about a field that admission changed; empty without one. Sending it again would change nothing."""
    metadata = {name: value for name, value in sent["metadata"].items() if name != "resourceVersion"}
    owners = [owner for owner in metadata.get("ownerReferences", ()) if "$patch" not in owner]
    return difference(stored, {**sent, "metadata": {**metadata, "ownerReferences": owners}})


def _is_seen(kind: ResourceKind, existing: Object, document: Object) -> bool:
    """True if decisions can use `existing` in place of `document`: Outrider created it, for any service.

    Decisions find children by the service label, and shared Jobs and profiles by the component label.
    """
    shared = component(document) in (cluster_model.PROFILING, cluster_model.PROFILE, cluster_model.SHARED_PROFILE)
    names = (
        cluster_model.MANAGED_BY_LABEL,
        cluster_model.COMPONENT_LABEL,
        *(() if shared else (cluster_model.SERVICE_LABEL,)),
    )
    labelled = all(label(existing, name) == label(document, name) for name in names)
    return labelled and not isinstance(admit(kind, existing), InvalidInput)


def _following(document: Object, decided_on: Object, claimed: Object) -> Object:
    """`document` with the resource version after a claim, if it names the version before: nothing else changed."""
    version, known = document["metadata"].get("resourceVersion"), decided_on["metadata"]["resourceVersion"]
    if version is None or version != known:
        return document
    return {**document, "metadata": {**document["metadata"], "resourceVersion": claimed["metadata"]["resourceVersion"]}}


def _adoption_metadata(adoption: Adoption) -> Object:
    metadata: Object = {"name": adoption.name, "uid": adoption.uid, "ownerReferences": [adoption.owner]}
    version = adoption.resource_version
    return metadata if version is None else {**metadata, "resourceVersion": version}


def _document(kind: ResourceKind, namespace: str, metadata: Object) -> Object:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"namespace": namespace, **metadata},
    }
