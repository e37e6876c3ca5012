"""Plan writes of the profile ConfigMaps: store results, join those of other services, release unused ones."""

from __future__ import annotations

from outrider_crds.profile import REPROFILE_ANNOTATION
from outrider_crds.profile_keys import ProfileKeys, settings_key

from outrider_operator.cluster_model import CONFIG_MAP, PROFILE, SERVICE_LABEL, Object, ServiceIdentity
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.outcome import Outcome
from outrider_operator.decide.ownership import labels, owner_reference
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profile_store import store_data
from outrider_operator.decide.profiling.known_profiles import SETTINGS_NOTE
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView
from outrider_operator.decide.profiling.shared_objects import joins, leave
from outrider_operator.validation.reading import is_being_deleted, items, mapping, text

PRODUCT_NOTE = "outrider.dev/product"
MODEL_NOTE = "outrider.dev/model"
_NOTES = (PRODUCT_NOTE, MODEL_NOTE, SETTINGS_NOTE)


def plan_profile_maps(view: ProfilingView, desired: DesiredState, profiles: list[ProductProfile]) -> Outcome:
    """Plan writes of profiles. Profiles of stored revisions stay.

    A change of a shared ConfigMap carries the version that it was decided on, so that services do not overwrite each
    other.
    """
    creates: list[Object] = []
    applies: list[Object] = []
    for profile in profiles:
        present = view.profiles.documents.get(profile_name(profile.keys.target))
        if present is None:
            creates += [_new(view.owner, desired, profile)] if store_data(profile.store) else []
        elif not is_being_deleted(present):
            applies += _changed(view, profile, present)
    used = {
        profile_name(keys.target) for revision in (*desired.stored, desired.spec_revision) for keys in revision.keys
    }
    releases, deletes = leave(CONFIG_MAP, view.profiles.documents.values(), used, view.owner)
    changed = (profile.keys.target for profile in profiles if view.store(profile.keys.target) != profile.store)
    stored = frozenset(profile_name(key) for key in changed)
    return Outcome(create=tuple(creates), apply=tuple(applies), adopt=releases, delete=deletes, stored=stored)


def _new(owner: ServiceIdentity, desired: DesiredState, profile: ProductProfile) -> Object:
    own = {name: value for name, value in labels(owner.name, PROFILE).items() if name != SERVICE_LABEL}
    return {
        "apiVersion": "v1",
        "kind": CONFIG_MAP,
        "metadata": {
            "name": profile_name(profile.keys.target),
            "namespace": owner.namespace,
            "labels": {**own, "app.kubernetes.io/instance": "outrider"},
            "annotations": {
                **profile_notes(desired, profile.keys),
                REPROFILE_ANNOTATION: " ".join(profile.store.requests),
            },
            "ownerReferences": [owner_reference(owner, controller=False)],
        },
        "data": store_data(profile.store),
    }


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
    mine = [owner_reference(view.owner, controller=False)] if new else []
    owners = [*items(present, "metadata", "ownerReferences"), *mine]
    return [_applied(present, owners, store_data(profile.store), " ".join(profile.store.requests))]


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
