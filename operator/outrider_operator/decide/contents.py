"""Which ConfigMaps must be read before a service can be decided about: the cache keeps them without their data."""

from __future__ import annotations

from outrider_operator.decide.desired_state import DesiredState
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.profiling.known_profiles import Sources, unread_sources
from outrider_operator.decide.revisions import unread_canary_maps, unread_map
from outrider_operator.decide.service_world import ServiceWorld


def unread_contents(
    world: ServiceWorld, desired: DesiredState, sources: Sources
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of ConfigMaps in the service's namespace and in the operator's whose contents were not read yet."""
    children, revision = world.children, desired.spec_revision
    names = (profile_name(keys.target) for keys in revision.keys)
    there = world.profiles.documents
    profiles = [name for name in names if name in there and "data" not in there[name]]
    own = [*unread_map(children, revision), *profiles, *unread_canary_maps(children, revision.name)]
    return (tuple(own), ()) if own else unread_sources(sources, desired)
