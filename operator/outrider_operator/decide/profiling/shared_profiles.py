"""Publish profiles for all namespaces: ConfigMaps in the operator's namespace, from namespaces that the chart names."""

from __future__ import annotations

from dataclasses import replace

from outrider_crds.profile_keys import (
    ProfileKeys,
    has_same_meaning_everywhere,
    is_drafter_the_same_everywhere,
    target_key,
)

from outrider_operator.cluster_model import CONFIG_MAP, SHARED_PROFILE, Object
from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.pod_spec.volumes import profile_name, profile_shared_as, shared_profile_name
from outrider_operator.decide.profile_store import Store, store_data
from outrider_operator.decide.profiling.known_profiles import newest
from outrider_operator.decide.profiling.product_profiles import ProductProfile, ProfilingView
from outrider_operator.decide.profiling.profile_maps import profile_map, profile_notes
from outrider_operator.decide.profiling.shared_objects import deletion
from outrider_operator.validation.reading import created_s, is_being_deleted, mapping, name_of, text, uid_of

MOST_SHARED = 64
"""Profiles that are kept for all namespaces."""
KEPT_S = 7 * 24 * 3600.0
"""Age from which one makes room for a new one. They have no owner, so no object tells which of them is still used; if
all are, each is published again at most once in this time."""


def plan_shared_profiles(view: ProfilingView, profiles: list[ProductProfile]) -> ConcernOutcome:
    """Publish the stored profiles of a service in a trusted namespace."""
    desired, settings, documents = view.desired, view.world.settings, view.sources.shared.documents
    is_trusted = view.owner.namespace in settings.profiling_shared_from
    if not is_trusted or not has_same_meaning_everywhere(desired.spec):
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


def _shareable(store: Store, desired: DesiredState, keys: ProfileKeys) -> Store:
    """The measurements in `store` that are valid in every namespace."""
    if not store.has_target(keys) or target_key(desired.spec, keys.product, desired.image) != keys.target:
        return Store()
    names = (drafter.name for drafter in desired.spec.draft_pool if is_drafter_the_same_everywhere(drafter))
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
