"""Plan writes of the profile ConfigMaps: store results, join those of other services, release unused ones."""

from __future__ import annotations

from outrider_crds.profile import REPROFILE_ANNOTATION
from outrider_crds.profile_keys import ProfileKeys, settings_key

from outrider_operator.cluster_model import CONFIG_MAP, PROFILE, SERVICE_LABEL, Object
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profile_store import Store, store_data
from outrider_operator.decide.profiling.known_profiles import SETTINGS_NOTE
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView
from outrider_operator.decide.profiling.shared_objects import joins, leave
from outrider_operator.validation.reading import is_being_deleted, items, mapping, text

PRODUCT_NOTE = "outrider.dev/product"
MODEL_NOTE = "outrider.dev/model"
_NOTES = (PRODUCT_NOTE, MODEL_NOTE, SETTINGS_NOTE)


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


def profile_notes(desired: DesiredState, keys: ProfileKeys) -> dict[str, str]:
    """Annotations that tell what a profile was measured for."""
    return {
        PRODUCT_NOTE: keys.product,
        MODEL_NOTE: desired.spec.target.name,
        SETTINGS_NOTE: settings_key(desired.spec, keys.product),
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
