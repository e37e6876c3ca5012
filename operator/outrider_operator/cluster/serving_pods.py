"""Find the serving pods of a service: those that its own Deployments or LeaderWorkerSet created. Labels alone do not
count, unless the service selects pods of another workload by them."""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol

from outrider_crds.existing_pods import ExistingPods
from outrider_crds.runtime_config import ADMIN_PORT, STATE_PATH

from outrider_operator import cluster_model
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster_model import Object
from outrider_operator.decide.ownership import selector
from outrider_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET, POD, REPLICA_SET, SERVICE, STATEFUL_SET
from outrider_operator.validation import reading


@dataclass(frozen=True)
class ServingPod:
    namespace: str
    name: str
    uid: str
    state_url: str
    """URL of its state; empty before the pod has an IP address."""
    ready: bool


def pod_url(address: str, path: str, port: int = ADMIN_PORT, scheme: str = "http") -> str:
    """URL of `path` in the pod at `address`; empty if that is no IP address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return f"{scheme}://{f'[{ip}]' if ip.version == 6 else ip}:{port}{path}"


class Selections(Protocol):
    """Pods of other workloads, by the service that selects them."""

    def of(self, key: Key) -> tuple[Object, ...]: ...
    def other_services(self, key: Key) -> Mapping[str, str]:
        """Pod name -> another service that selects the pod, or that made it."""


class ServingPods:
    """Reads serving pods from the cache. It stores nothing itself.

    admin_port: where pods that Outrider made answer.
    """

    def __init__(self, cache: ObjectCache, selections: Selections | None = None, admin_port: int = ADMIN_PORT) -> None:
        self._cache = cache
        self._selections = selections
        self._admin_port = admin_port

    def services(self) -> list[Key]:
        """Services that have serving pods, by their label or by their selector."""
        keys = map(Key.of, self._cache.all(SERVICE))
        return [key for key in keys if self._labelled(key) or self._selected(key)]

    def of(self, key: Key) -> tuple[ServingPod, ...]:
        existing = self._existing(key)
        port, scheme = (self._admin_port, "http") if existing is None else (existing.port, existing.scheme.lower())
        return tuple(_serving_pod(document, port, scheme) for document in self.documents(key))

    def documents(self, key: Key) -> tuple[Object, ...]:
        """The serving pods of `key`, as Kubernetes objects."""
        if self._existing(key) is not None:
            return self._selected(key)
        labelled = self._labelled(key)
        made_by = self._replica_sets(key) | self._leaders(key) if labelled else frozenset()
        return tuple(
            pod
            for pod in labelled
            if reading.controller_uid(pod) in made_by and reading.component(pod) == cluster_model.SERVING
        )

    def workers(self, key: Key) -> tuple[Object, ...]:
        """The other pods of each group. Their StatefulSet belongs to the group's leader."""
        labelled = tuple(pod for pod in self._labelled(key) if reading.component(pod) == cluster_model.WORKER)
        if not labelled:
            return ()
        leaders = {reading.uid_of(pod) for pod in self.documents(key)}
        sets = self._cache.labelled(
            STATEFUL_SET, key.namespace, cluster_model.GROUPS_LABEL, cluster_model.groups_name(key.name)
        )
        made_by = {reading.uid_of(made) for made in sets if reading.controller_uid(made) in leaders}
        return tuple(pod for pod in labelled if reading.controller_uid(pod) in made_by)

    def other_services(self, key: Key) -> Mapping[str, str]:
        return self._selections.other_services(key) if self._selections is not None else {}

    def has_groups(self, key: Key) -> bool:
        """Is there a StatefulSet of a LeaderWorkerSet with the name of the service's?"""
        return bool(self._leaders(key))

    def _labelled(self, key: Key) -> tuple[Object, ...]:
        return self._cache.labelled(POD, key.namespace, cluster_model.SERVICE_LABEL, key.name)

    def _existing(self, key: Key) -> ExistingPods | None:
        return cluster_model.existing_pods(self._cache.get(SERVICE, key.namespace, key.name))

    def _selected(self, key: Key) -> tuple[Object, ...]:
        return self._selections.of(key) if self._selections is not None else ()

    def _replica_sets(self, key: Key) -> frozenset[str]:
        """uids of the ReplicaSets of the service's Deployments, including those that one is about to adopt."""
        names = (key.name, cluster_model.canary_name(key.name))
        deployments = {reading.uid_of(self._cache.get(DEPLOYMENT, key.namespace, name) or {}) for name in names}
        replica_sets = self._cache.labelled(REPLICA_SET, key.namespace, cluster_model.SERVICE_LABEL, key.name)
        return frozenset(
            reading.uid_of(replica_set)
            for replica_set in replica_sets
            if _makes_pods_of(replica_set, key.name, deployments)
        )

    def _leaders(self, key: Key) -> frozenset[str]:
        """uid of the StatefulSet that makes the leaders: the one that the LeaderWorkerSet itself controls."""
        name = cluster_model.groups_name(key.name)
        made = self._cache.get(STATEFUL_SET, key.namespace, name)
        owner = reading.controller_of(made or {})
        is_leaders = (reading.text(owner, "kind"), reading.text(owner, "name")) == (LEADER_WORKER_SET.kind, name)
        return frozenset({reading.uid_of(made)}) if made is not None and is_leaders else frozenset()


def _serving_pod(document: Object, port: int, scheme: str) -> ServingPod:
    return ServingPod(
        namespace=reading.namespace_of(document),
        name=reading.name_of(document),
        uid=reading.uid_of(document),
        state_url=pod_url(reading.text(document, "status", "podIP"), STATE_PATH, port, scheme),
        ready=reading.is_true(document, "Ready"),
    )


def _makes_pods_of(replica_set: Object, service: str, deployments: Container[str]) -> bool:
    """Does `replica_set` belong to one of `deployments`? A Deployment adopts ReplicaSets that its selector matches."""
    owner = reading.controller_uid(replica_set)
    return owner in deployments if owner else selector(service).items() <= reading.labels_of(replica_set).items()
