"""The serving pods of every service: those that its own Deployment made, whoever else carries the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outrider_operator import telemetry
from outrider_operator.cache import Cache, uid_of
from outrider_operator.inbound.pods import ServingPod, owned_by, serving_pod
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.kinds import DEPLOYMENT, POD, REPLICA_SET, Kind, component, name_of, namespace_of
from outrider_operator.model import SERVICE_LABEL, SERVING, Object
from outrider_operator.work_queue import Key


class ServingPods:
    """Follows the cache, so that nobody needs to go through all pods for one service's."""

    def __init__(self, cache: Cache, waiting_changed: Callable[[], None] = lambda: None) -> None:
        self._cache = cache
        self._waiting_changed = waiting_changed
        self._pods: dict[str, ServingPod] = {}  # by uid
        self._services: dict[Key, dict[str, ServingPod]] = {}
        self._waiting: set[str] = set()
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
        return self._documents(self.of(key))

    def waiting(self) -> tuple[Object, ...]:
        """Pods of any service that have no node."""
        keys = {_key(self._pods[uid]) for uid in self._waiting}
        return self._documents(pod for key in keys for pod in self.of(key) if pod.uid in self._waiting)

    def _documents(self, pods: Iterable[ServingPod]) -> tuple[Object, ...]:
        found = (self._cache.get(POD, pod.namespace, pod.name) for pod in pods)
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
        self._note_waiting(uid_of(document), present)

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

    def _note_waiting(self, uid: str, document: Object | None) -> None:
        waits = uid in self._pods and document is not None and _waits_for_a_node(document)
        if waits == (uid in self._waiting):
            return
        (self._waiting.add if waits else self._waiting.discard)(uid)
        self._waiting_changed()


def _key(pod: ServingPod) -> Key:
    return Key(pod.namespace, pod.service)


def _waits_for_a_node(pod: Object) -> bool:
    return not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
