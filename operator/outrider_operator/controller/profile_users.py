"""Index of the services that use each profile. A profile is shared, as are its Job and that Job's pods."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from outrider_operator.cluster.cache import Key


class ProfileUsers:
    """Services by the names of the profiles that their last decisions used, whether measured or not."""

    def __init__(self) -> None:
        self._names: dict[Key, frozenset[str]] = {}
        self._users: defaultdict[tuple[str, str], set[Key]] = defaultdict(set)
        """(namespace, name of the profile) -> services."""

    def of(self, namespace: str, profile: str) -> tuple[Key, ...]:
        return tuple(self._users.get((namespace, profile), ()))

    def everywhere(self, profile: str) -> frozenset[Key]:
        """Return the services of all namespaces that use it."""
        return frozenset(user for (_, name), users in self._users.items() if name == profile for user in users)

    def note(self, key: Key, profiles: Iterable[str]) -> bool:
        """Record all profiles that the service uses. True if one is new: the service may have missed its changes."""
        before, after = self._names.get(key, frozenset()), frozenset(profiles)
        for name in after - before:
            self._users[key.namespace, name].add(key)
        for name in before - after:
            self._users[key.namespace, name].remove(key)
            if not self._users[key.namespace, name]:
                del self._users[key.namespace, name]
        self._names[key] = after
        return bool(after - before)

    def forget(self, key: Key) -> None:
        self.note(key, ())
        del self._names[key]
