"""The profile ConfigMaps: store what Jobs measured, join those of other services, leave those no longer used."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.profile import REPROFILE_ANNOTATION, ProfileKeys, settings_key

from outrider_operator.decide.intent import Intent
from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profile_store import store_data
from outrider_operator.decide.profiling.known_profiles import SETTINGS_NOTE
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView
from outrider_operator.decide.profiling.sharing import joins, leave
from outrider_operator.inbound.reading import is_being_deleted, items, mapping, text
from outrider_operator.model import CONFIG_MAP, PROFILE, SERVICE_LABEL, Identity, Object
from outrider_operator.plan import Adoption, Delete

PRODUCT_NOTE = "outrider.dev/product"
MODEL_NOTE = "outrider.dev/model"
_NOTES = (PRODUCT_NOTE, MODEL_NOTE, SETTINGS_NOTE)


@dataclass(frozen=True)
class ProfileMapPlan:
    create: tuple[Object, ...] = ()
    apply: tuple[Object, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    delete: tuple[Delete, ...] = ()
    stored: tuple[str, ...] = ()
    """Names of those that get other contents."""


def plan_profile_maps(view: ProfilingView, intent: Intent, found: list[ProductProfile]) -> ProfileMapPlan:
    """Changes of shared ConfigMaps name the version they were decided on, so that no two services' overlap.

    Profiles of the revisions that are stored stay.
    """
    creates: list[Object] = []
    applies: list[Object] = []
    for each in found:
        present = view.profiles.documents.get(profile_name(each.keys.target))
        if present is None:
            creates += [_new(view.owner, intent, each)] if store_data(each.store) else []
        elif not is_being_deleted(present):
            applies += _changed(view, each, present)
    used = {profile_name(keys.target) for revision in (*intent.stored, intent.wanted) for keys in revision.keys}
    releases, deletes = leave(CONFIG_MAP, view.profiles.documents.values(), used, view.owner)
    stored = tuple(profile_name(each.keys.target) for each in found if view.store(each.keys.target) != each.store)
    return ProfileMapPlan(tuple(creates), tuple(applies), releases, deletes, stored)


def _new(owner: Identity, intent: Intent, each: ProductProfile) -> Object:
    own = {name: value for name, value in labels(owner.name, PROFILE).items() if name != SERVICE_LABEL}
    return {
        "apiVersion": "v1",
        "kind": CONFIG_MAP,
        "metadata": {
            "name": profile_name(each.keys.target),
            "namespace": owner.namespace,
            "labels": {**own, "app.kubernetes.io/instance": "outrider"},
            "annotations": {
                **profile_notes(intent, each.keys),
                REPROFILE_ANNOTATION: " ".join(each.store.requests),
            },
            "ownerReferences": [owner_reference(owner, controller=False)],
        },
        "data": store_data(each.store),
    }


def profile_notes(intent: Intent, keys: ProfileKeys) -> dict[str, str]:
    """Annotations that say what a profile was measured for."""
    return {
        PRODUCT_NOTE: keys.product,
        MODEL_NOTE: intent.spec.target.name,
        SETTINGS_NOTE: settings_key(intent.spec, keys.product),
    }


def _changed(view: ProfilingView, each: ProductProfile, present: Object) -> list[Object]:
    """The ConfigMap with new contents or with this service as a further owner; [] when it needs neither."""
    new = joins(present, view.owner)
    if not new and view.store(each.keys.target) == each.store:
        return []
    mine = [owner_reference(view.owner, controller=False)] if new else []
    owners = [*items(present, "metadata", "ownerReferences"), *mine]
    return [_applied(present, owners, store_data(each.store), " ".join(each.store.requests))]


def _applied(present: Object, owners: list[Object], data: Object, requests: str) -> Object:
    metadata = mapping(present, "metadata")
    annotations = {name: text(metadata, "annotations", name) for name in _NOTES}
    return {
        "apiVersion": "v1",
        "kind": CONFIG_MAP,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata.get("namespace"),
            "uid": metadata.get("uid"),
            "resourceVersion": metadata.get("resourceVersion"),
            "labels": mapping(metadata, "labels"),
            "annotations": {**annotations, REPROFILE_ANNOTATION: requests},
            "ownerReferences": owners,
        },
        "data": data,
    }
