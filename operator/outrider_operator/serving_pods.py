"""The serving pods of every service: those that its own Deployments made, whoever else carries the labels."""

from __future__ import annotations

from collections.abc import Container

from outrider_operator.cache import Cache
from outrider_operator.decide.ownership import selector
from outrider_operator.inbound.pods import ServingPod, serving_pod
from outrider_operator.inbound.reading import component, controller_uid, labels_of, name_of, namespace_of, uid_of
from outrider_operator.kinds import DEPLOYMENT, POD, REPLICA_SET, SERVICE
from outrider_operator.model import SERVICE_LABEL, SERVING, Object, canary_name
from outrider_operator.work_queue import Key


class ServingPods:
    """Reads the cache, and keeps nothing: what it says is never older than that."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def services(self) -> list[Key]:
        """Services that have pods, or objects that carry their labels."""
        keys = (Key(namespace_of(service), name_of(service)) for service in self._cache.all(SERVICE))
        return [key for key in keys if self._labelled(key)]

    def of(self, key: Key) -> tuple[ServingPod, ...]:
        return tuple(serving_pod(document) for document in self.documents(key))

    def documents(self, key: Key) -> tuple[Object, ...]:
        """The pods of `key` as the cache has them."""
        labelled = self._labelled(key)
        made_by = self._replica_sets(key) if labelled else frozenset()
        return tuple(each for each in labelled if controller_uid(each) in made_by and component(each) == SERVING)

    def _labelled(self, key: Key) -> tuple[Object, ...]:
        return self._cache.labelled(POD, key.namespace, SERVICE_LABEL, key.name)

    def _replica_sets(self, key: Key) -> frozenset[str]:
        """uids of those of the service's Deployments, and of those without a controller that one is about to adopt."""
        names = (key.name, canary_name(key.name))
        deployments = {uid_of(self._cache.get(DEPLOYMENT, key.namespace, name) or {}) for name in names}
        found = self._cache.labelled(REPLICA_SET, key.namespace, SERVICE_LABEL, key.name)
        return frozenset(uid_of(each) for each in found if _makes_pods_of(each, key.name, deployments))


def _makes_pods_of(replica_set: Object, service: str, deployments: Container[str]) -> bool:
    """A Deployment adopts what its selector selects."""
    owner = controller_uid(replica_set)
    return owner in deployments if owner else selector(service).items() <= labels_of(replica_set).items()
