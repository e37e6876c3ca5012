"""Plan writes of the profile ConfigMaps: store results, join those of other services, release unused ones.

Profiles for all namespaces are published in the operator's namespace, from namespaces that the chart names.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from outrider_crds import profile_keys
from outrider_crds.profile import REPROFILE_ANNOTATION

from outrider_operator.cluster_model import (
    CONFIG_MAP,
    PROFILE,
    PROFILING,
    SERVICE_LABEL,
    SHARED_PROFILE,
    Object,
    ServiceIdentity,
)
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.desired.profile_store import Store, store_data
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.ownership import labels, owner_reference, owner_uids
from outrider_operator.decide.pod_spec.volumes import profile_name, profile_shared_as, shared_profile_name
from outrider_operator.decide.profiling.known_profiles import SETTINGS_NOTE, newest
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView
from outrider_operator.plan import Adoption, Delete
from outrider_operator.validation.reading import created_s, is_being_deleted, items, mapping, name_of, text, uid_of

PRODUCT_NOTE = "outrider.dev/product"
MODEL_NOTE = "outrider.dev/model"
_NOTES = (PRODUCT_NOTE, MODEL_NOTE, SETTINGS_NOTE)
MAX_OWNERS = 64
"""Owner references per shared object. Further services use it but do not keep it alive: when the last owner is gone,
they measure again."""
MOST_SHARED = 64
"""Profiles that are kept for all namespaces."""
KEPT_S = 7 * 24 * 3600.0
"""Age from which one makes room for a new one. They have no owner, so no object tells which of them is still used; if
all are, each is published again at most once in this time."""


def plan_profile_maps(view: ProfilingView, profiles: list[ProductProfile]) -> ConcernOutcome:
    """Plan writes of profiles. Profiles of stored revisions stay.

    A change of a shared ConfigMap carries the version that it was decided on, so that services do not overwrite each
    other.
    """
    desired, documents = view.desired, view.sources.own.documents
    creates: list[Object] = []
    applies: list[Object] = []
    for profile in profiles:
        name, data = profile_name(profile.keys.target), store_data(profile.store)
        present = documents.get(name)
        if present is None and data:
            owners = [owner_reference(view.owner, controller=False)]
            document = profile_map(name, view.owner.namespace, PROFILE, profile_notes(desired, profile.keys), data)
            creates.append(_with(document, profile.store, {"ownerReferences": owners}))
        elif present is not None and not is_being_deleted(present):
            applies += _changed(view, profile, present)
    revisions = (*desired.stored, desired.spec_revision)
    used = {profile_name(keys.target) for revision in revisions for keys in revision.keys}
    releases, deletes = leave(CONFIG_MAP, documents.values(), used, view.owner)
    changed = (profile.keys.target for profile in profiles if view.store(profile.keys.target) != profile.store)
    stored = frozenset(profile_name(key) for key in changed)
    return ConcernOutcome(create=tuple(creates), apply=tuple(applies), adopt=releases, delete=deletes, stored=stored)


def profile_map(name: str, namespace: str, component: str, notes: dict[str, str], data: dict[str, str]) -> Object:
    """A profile's ConfigMap without owners. Its labels name no service: several may use it."""
    own = {label: value for label, value in labels("outrider", component).items() if label != SERVICE_LABEL}
    metadata = {"name": name, "namespace": namespace, "labels": own, "annotations": notes}
    return {"apiVersion": "v1", "kind": CONFIG_MAP, "metadata": metadata, "data": data}


def profile_notes(desired: DesiredState, keys: profile_keys.ProfileKeys) -> dict[str, str]:
    """Annotations that tell what a profile was measured for."""
    return {
        PRODUCT_NOTE: keys.product,
        MODEL_NOTE: desired.spec.target.name,
        SETTINGS_NOTE: profile_keys.settings_key(desired.spec, keys.product),
    }


def _changed(view: ProfilingView, profile: ProductProfile, present: Object) -> list[Object]:
    """The ConfigMap with new contents or this service as another owner; [] if neither is needed."""
    new = joins(present, view.owner)
    if not new and view.store(profile.keys.target) == profile.store:
        return []
    metadata = mapping(present, "metadata")
    mine = [owner_reference(view.owner, controller=False)] if new else []
    kept = {name: metadata.get(name) for name in ("name", "namespace", "uid", "resourceVersion")}
    kept |= {
        "labels": mapping(metadata, "labels"),
        "annotations": {n: text(metadata, "annotations", n) for n in _NOTES},
    }
    owners = {"ownerReferences": [*items(metadata, "ownerReferences"), *mine]}
    document = {"apiVersion": "v1", "kind": CONFIG_MAP, "metadata": kept, "data": store_data(profile.store)}
    return [_with(document, profile.store, owners)]


def _with(document: Object, store: Store, fields: Object) -> Object:
    """`document` with the requests that `store` has served, and further fields of its metadata."""
    metadata = document["metadata"]
    annotations = {**metadata["annotations"], REPROFILE_ANNOTATION: " ".join(store.requests)}
    return {**document, "metadata": {**metadata, "annotations": annotations, **fields}}


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


def plan_shared_profiles(view: ProfilingView, profiles: list[ProductProfile]) -> ConcernOutcome:
    """Publish the stored profiles of a service in a trusted namespace."""
    desired, settings, documents = view.desired, view.world.settings, view.sources.shared.documents
    is_trusted = view.owner.namespace in settings.profiling_shared_from
    if not is_trusted or not profile_keys.has_same_meaning_everywhere(desired.spec):
        return ConcernOutcome()
    creates: list[Object] = []
    applies: list[Object] = []
    for keys in (profile.keys for profile in profiles):
        before = view.sources.shared.store(keys.target)
        after = newest(before, _shareable(view.store(keys.target), desired, keys), keys)
        if after != before:
            present, notes = documents.get(profile_name(keys.target)), profile_notes(desired, keys)
            name = shared_profile_name(profile_name(keys.target))
            document = profile_map(name, settings.namespace, SHARED_PROFILE, notes, store_data(after))
            if present is None:
                creates.append(document)
            elif not is_being_deleted(present):
                applies.append(_following(document, present))
    surplus = _surplus(view, len(creates))
    creates = creates[: max(0, MOST_SHARED + len(surplus) - len(documents))]
    deletes = tuple(replace(deletion(CONFIG_MAP, old, SHARED_PROFILE), namespace=settings.namespace) for old in surplus)
    published = frozenset(profile_shared_as(name_of(document)) for document in (*creates, *applies))
    return ConcernOutcome(create=tuple(creates), apply=tuple(applies), delete=deletes, published=published)


def _shareable(store: Store, desired: DesiredState, keys: profile_keys.ProfileKeys) -> Store:
    """The measurements in `store` that are valid in every namespace."""
    if not store.has_target(keys) or profile_keys.target_key(desired.spec, keys.product, desired.image) != keys.target:
        return Store()
    names = (
        drafter.name for drafter in desired.spec.draft_pool if profile_keys.is_drafter_the_same_everywhere(drafter)
    )
    shared = {keys.drafters[name] for name in names if name in keys.drafters}
    return Store(store.target, {key: drafter for key, drafter in store.drafters.items() if key in shared})


def _following(document: Object, present: Object) -> Object:
    version = {"uid": uid_of(present), "resourceVersion": text(present, "metadata", "resourceVersion")}
    return {**document, "metadata": {**mapping(document, "metadata"), **version}}


def _surplus(view: ProfilingView, new: int) -> list[Object]:
    """The oldest profiles, as many as `new` ones need room and are long unused or may be measured again."""
    documents, since = view.sources.shared.documents, view.world.at - KEPT_S
    old = sorted((document for document in documents.values() if created_s(document) < since), key=created_s)
    return old[: max(0, len(documents) + new - MOST_SHARED)]
