"""Measurements from elsewhere that a service may use: of another image with the same engine, or of another namespace.

Profiles that all namespaces use are stored in the operator's namespace. The operator writes them from measurements of
the namespaces that the chart names. Others are not trusted: a tenant that may create pods can forge measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_crds.profile import DrafterProfile, TargetProfile
from outrider_crds.profile_keys import ProfileKeys, drafter_key, has_same_meaning_everywhere, settings_key, target_key

from outrider_operator.cluster_model import OperatorSettings
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.desired.profile_store import Profiles, Store
from outrider_operator.decide.pod_spec.volumes import profile_name, shared_profile_name
from outrider_operator.validation.reading import annotation, created_s, unix_seconds

SETTINGS_NOTE = "outrider.dev/settings"
"""Annotation of a profile: digest of everything in its key except the image."""
_RELATIVES_READ = 4
"""Profiles of other images that are read. Users may create any number of them."""


@dataclass(frozen=True)
class Sources:
    """Measurements that a service may use in addition to its own profile."""

    own: Profiles = field(default_factory=Profiles)
    """Profiles of the service's namespace."""
    shared: Profiles = field(default_factory=Profiles)
    """Profiles that all namespaces use."""
    engine_version: str = ""
    """Version of the engine in the service's image; empty if it is unknown."""


def sources_of(own: Profiles, shared: Profiles, settings: OperatorSettings, desired: DesiredState) -> Sources:
    return Sources(own, shared, _engine_version(settings, desired))


def unread_sources(sources: Sources, desired: DesiredState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of ConfigMaps, in the service's namespace and in the operator's, whose contents must be read first."""
    own: list[str] = []
    shared: list[str] = []
    for keys in _keys_of_spec(desired):
        own += _unread(sources.own, _relatives(sources.own, sources, desired, keys))
        present = [name for name in (profile_name(keys.target),) if name in sources.shared.documents]
        shared += _unread(sources.shared, [*present, *_relatives(sources.shared, sources, desired, keys)])
    return tuple(own), tuple(shared_profile_name(name) for name in shared)


def known_elsewhere(sources: Sources, desired: DesiredState, keys: ProfileKeys) -> Store:
    """Measurements for `keys` from other namespaces or other images."""
    if keys not in _keys_of_spec(desired):
        return Store()
    known = Store()
    if has_same_meaning_everywhere(desired.spec):
        known = newest(sources.shared.store(keys.target), known, keys)
    for profiles in (sources.own, sources.shared):
        for name in _relatives(profiles, sources, desired, keys):
            known = newest(known, _under(profiles.named(name), sources, desired, keys), keys)
    return known


def newest(store: Store, other: Store, keys: ProfileKeys) -> Store:
    """The newer of two measurements of each key in `keys`."""
    target = other.target
    if target is not None and other.has_target(keys) and _is_newer(target, store.target, store.has_target(keys)):
        store = store.with_target(target)
    for key in keys.drafters.values():
        drafter = other.drafters.get(key)
        if drafter is not None and _is_newer(drafter, store.drafters.get(key), key in store.drafters):
            store = store.with_drafter(drafter)
    return store


def _is_newer(new: TargetProfile | DrafterProfile, old: TargetProfile | DrafterProfile | None, is_there: bool) -> bool:
    return old is None or not is_there or _measured_s(new) > _measured_s(old)


def _measured_s(profile: TargetProfile | DrafterProfile) -> float:
    return unix_seconds(profile.measured_at) or 0.0


def _engine_version(settings: OperatorSettings, desired: DesiredState) -> str:
    """Version of the engine; empty unless the service runs the image of the installed release."""
    if desired.spec.pod_template.image or desired.images.pinned != desired.images.installed:
        return ""
    return (
        settings.runtime_engine_version_cpu if desired.spec.accelerator.on_cpu else settings.runtime_engine_version_gpu
    )


def _keys_of_spec(desired: DesiredState) -> list[ProfileKeys]:
    """Keys of the spec's revision that belong to the spec. For an unreadable spec that revision is the running one."""
    spec, image = desired.spec, desired.image
    return [keys for keys in desired.spec_revision.keys if target_key(spec, keys.product, image) == keys.target]


def _relatives(profiles: Profiles, sources: Sources, desired: DesiredState, keys: ProfileKeys) -> list[str]:
    """Names of profiles that differ only in the image, newest first; [] if the service's own has the target."""
    if not sources.engine_version or sources.own.store(keys.target).has_target(keys):
        return []
    if profiles is sources.shared and not has_same_meaning_everywhere(desired.spec):
        return []
    settings, own = settings_key(desired.spec, keys.product), profile_name(keys.target)
    dated = [
        (created_s(document), name)
        for name, document in profiles.documents.items()
        if name != own and annotation(document, SETTINGS_NOTE) == settings
    ]
    return [name for _, name in sorted(dated, reverse=True)[:_RELATIVES_READ]]


def _unread(profiles: Profiles, names: list[str]) -> list[str]:
    return [name for name in names if "data" not in profiles.documents[name]]


def _under(store: Store, sources: Sources, desired: DesiredState, keys: ProfileKeys) -> Store:
    """Measurements of another image with the keys of this image, if both have the same engine."""
    target = store.target
    if target is None or target.engine_version != sources.engine_version:
        return Store()
    moved = {
        keys.drafters[drafter.name]: old.model_copy(update={"key": keys.drafters[drafter.name]})
        for drafter in desired.spec.draft_pool
        if drafter.name in keys.drafters and (old := store.drafters.get(drafter_key(target.key, drafter))) is not None
    }
    return Store(target.model_copy(update={"key": keys.target}), moved)
