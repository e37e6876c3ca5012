"""The serving pods of every service: those that its own Deployment made, whoever else carries the labels."""

from __future__ import annotations

from collections.abc import Iterable

from outrider_operator import telemetry
from outrider_operator.cache import Cache
from outrider_operator.inbound.pods import ServingPod, owned_by, serving_pod
from outrider_operator.inbound.reading import component, name_of, namespace_of, uid_of
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.kinds import DEPLOYMENT, POD, REPLICA_SET, Kind
from outrider_operator.model import SERVICE_LABEL, SERVING, Object
from outrider_operator.work_queue import Key


class ServingPods:
    """Follows the cache, so that nobody needs to go through all pods for one service's."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._pods: dict[str, ServingPod] = {}  # by uid
        self._services: dict[Key, dict[str, ServingPod]] = {}
        cache.subscribe(self._follow)

    def services(self) -> Iterable[Key]:
        """Services that have pods."""
        return list(self._services)

    def of(self, key: Key) -> tuple[ServingPod, ...]:
        pods = self._services.get(key, {}).values()
        owners = self._owners(key) if pods else frozenset()
        return tuple(pod for pod in pods if pod.owner in owners)

    def documents(self, key: Key) -> tuple[Object, ...]:
        """The pods of `key` as the cache has them."""
        found = (self._cache.get(POD, pod.namespace, pod.name) for pod in self.of(key))
        return tuple(document for document in found if document is not None)

    def _owners(self, key: Key) -> frozenset[str]:
        replica_sets = self._cache.labelled(REPLICA_SET, key.namespace, SERVICE_LABEL, key.name)
        return owned_by(replica_sets, self._cache.get(DEPLOYMENT, key.namespace, key.name))

    def _follow(self, kind: Kind, document: Object) -> None:
        if kind != POD:
            return
        self._drop(uid_of(document))
        present = self._cache.get(POD, namespace_of(document), name_of(document))
        if present is not None and component(present) == SERVING:
            self._drop(uid_of(present))
            self._take(present)

    def _take(self, document: Object) -> None:
        pod = serving_pod(document)
        if isinstance(pod, Unfit):
            telemetry.count_unfit(pod)
            return
        self._pods[pod.uid] = pod
        self._services.setdefault(_key(pod), {})[pod.uid] = pod

    def _drop(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        del self._services[_key(pod)][uid]
        if not self._services[_key(pod)]:
            del self._services[_key(pod)]


def _key(pod: ServingPod) -> Key:
    return Key(pod.namespace, pod.service)
