"""Read everything that one decision needs: a service and all objects that belong to it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from outrider_crds.prefetch_report import PrefetchProgress

from outrider_operator import cluster_model, kinds
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster_model import ApiRefusal, Node, Object, Observed, OperatorSettings
from outrider_operator.controller.child_reader import (
    ChildReader,
    Foreign,
    current_warning,
    node_in_the_making,
    read_sentences,
    without_container,
)
from outrider_operator.decide.ownership import owner_uids
from outrider_operator.decide.pod_spec.volumes import profile_shared_as
from outrider_operator.decide.pods.job_pods import is_finished
from outrider_operator.decide.pods.pod_troubles import unschedulable_since
from outrider_operator.kinds import ResourceKind
from outrider_operator.service_metrics.measurements import Measurements
from outrider_operator.validation.managed_fields import ReplicaWriter, noted, rivals
from outrider_operator.validation.reading import component, created_s, labels_of, name_of, text, uid_of

_AWAITED_S = 900.0
"""Age from which a Job of another namespace is not waited for: it may have no room."""


class Observer:
    """Reads the cache, and from the API server only children that the cache lacks."""

    def __init__(
        self,
        api: KubernetesApi,
        cache: ObjectCache,
        measurements: Measurements,
        settings: OperatorSettings,
    ) -> None:
        self._api = api
        self._cache = cache
        self._pods = measurements.pods
        self._children = ChildReader(api, cache)
        self._measurements = measurements
        self._settings = settings
        self._nodes: tuple[Node, ...] | None = None
        self._replica_writers: dict[Key, tuple[ReplicaWriter, ...]] = {}
        cache.subscribe(self._forget_nodes)

    async def observe(self, service: Object, refusals: tuple[ApiRefusal, ...], *, is_new: bool = False) -> Observed:
        """Everything that a decision about `service` needs. A new service's first reconcile makes no requests, so that
        a hundred new services do not wait for each other."""
        key = Key.of(service)
        pods, workers = self._pods.documents(key), self._pods.workers(key)
        jobs = self._of_component(kinds.JOB, key.namespace, cluster_model.PROFILING)
        job_pods = self._of_component(kinds.POD, key.namespace, cluster_model.PROFILING)
        prefetch_jobs = self._of_service(kinds.JOB, key, cluster_model.PREFETCH)
        prefetch_pods = self._of_service(kinds.POD, key, cluster_model.PREFETCH)
        serving = (*pods, *workers)
        own_jobs = [job for job in (*jobs, *prefetch_jobs) if uid_of(service) in owner_uids(job)]
        waiting = without_container(serving, own_jobs, (*job_pods, *prefetch_pods))
        children = self._children.labelled(key) | ({} if is_new else await self._children.named(key, service))
        gateway, groups = (Foreign(), Foreign()) if is_new else await self._foreign(key, service)
        return Observed(
            service=service,
            at=time.time(),
            nodes=self._all_nodes(),
            children={**gateway.documents, **groups.documents, **children},
            pool_access=gateway.access,
            groups_access=groups.access,
            replica_sets=self._labelled(kinds.REPLICA_SET, key),
            pods=pods,
            workers=workers,
            pod_rivals=self._pods.other_services(key),
            warnings=await read_sentences(self._api, key.namespace, waiting, current_warning),
            provisioning=await self._provisioning(key.namespace, serving),
            states=self._measurements.states(key),
            unreachable=self._measurements.unreachable(key),
            network_policies=await self._network_policies(key),
            jobs=jobs,
            prefetch_jobs=prefetch_jobs,
            prefetch_pods=prefetch_pods,
            prefetch_progress=await self._progress(prefetch_pods),
            job_pods=job_pods,
            profiles=self._profiles(key.namespace),
            shared_profiles=self._shared_profiles(),
            measured_elsewhere=self._measured_elsewhere(key.namespace),
            figures=self._measurements.figures(key, service),
            refusals=refusals,
            replica_rivals=rivals(self._note_replica_writer(key, service)),
        )

    async def read(self, namespace: str, names: Iterable[str]) -> None:
        """Read the contents of ConfigMaps into the cache for the next decision."""
        await self._children.read(namespace, names)

    def forget(self, key: Key) -> None:
        """Remove what is kept about a service that is gone."""
        self._replica_writers.pop(key, None)

    async def _foreign(self, key: Key, service: Object) -> tuple[Foreign, Foreign]:
        gateway = await self._children.gateway(key, service)
        return gateway, await self._children.groups(key, service, has_groups=self._pods.has_groups(key))

    def _note_replica_writer(self, key: Key, service: Object) -> tuple[ReplicaWriter, ...]:
        before = self._replica_writers.get(key, ())
        turns = self._replica_writers[key] = noted(before, text(service, cluster_model.REPLICA_WRITER), time.time())
        return turns

    def _profiles(self, namespace: str) -> dict[str, Object]:
        return {name_of(it): it for it in self._of_component(kinds.CONFIG_MAP, namespace, cluster_model.PROFILE)}

    def _shared_profiles(self) -> dict[str, Object]:
        """Return them by the names that they have elsewhere, where the label means nothing: anyone may put it on."""
        if not self._settings.profiling_shared_from:
            return {}
        shared = self._of_component(kinds.CONFIG_MAP, self._settings.namespace, cluster_model.SHARED_PROFILE)
        return {profile_shared_as(name_of(profile)): profile for profile in shared}

    def _measured_elsewhere(self, namespace: str) -> frozenset[str]:
        """Jobs whose results this namespace will use. Of two trusted namespaces that began the same Job, the first
        measures. Its place does not depend on its age: each would delete the other's pending Job in turn."""
        trusted = self._settings.profiling_shared_from
        own = self._active_jobs(namespace, within_s=math.inf) if namespace in trusted else {}
        others = (self._active_jobs(other, within_s=_AWAITED_S) for other in trusted if other != namespace)
        return frozenset(
            name for jobs in others for name, order in jobs.items() if name not in own or order < own[name]
        )

    def _active_jobs(self, namespace: str, *, within_s: float) -> dict[str, tuple[float, str]]:
        """Name -> place in the order of Jobs, for the namespace's unfinished Jobs that are younger than `within_s`."""
        jobs = self._of_component(kinds.JOB, namespace, cluster_model.PROFILING)
        return {
            name_of(job): (created_s(job), namespace)
            for job in jobs
            if not is_finished(job) and time.time() - created_s(job) < within_s
        }

    async def _network_policies(self, key: Key) -> tuple[Object, ...]:
        """Return those of the namespace where a pod is unreachable: one of them may be why."""
        return await self._children.network_policies(key.namespace) if self._measurements.unreachable(key) else ()

    async def _provisioning(self, namespace: str, pods: Iterable[Object]) -> dict[str, str]:
        pending = [pod for pod in pods if unschedulable_since(pod) is not None]
        return await read_sentences(self._api, namespace, pending, node_in_the_making)

    async def _progress(self, pods: Iterable[Object]) -> PrefetchProgress | None:
        """What the running pod of a prefetch Job reports."""
        addresses = (text(pod, "status", "podIP") for pod in pods if text(pod, "status", "phase") == "Running")
        address = next(filter(None, addresses), "")
        return await self._measurements.prefetch(address) if address else None

    def _labelled(self, kind: ResourceKind, key: Key) -> tuple[Object, ...]:
        return self._cache.labelled(kind, key.namespace, cluster_model.SERVICE_LABEL, key.name)

    def _of_service(self, kind: ResourceKind, key: Key, value: str) -> tuple[Object, ...]:
        """Objects of the service whose component label is `value`."""
        return tuple(document for document in self._labelled(kind, key) if component(document) == value)

    def _of_component(self, kind: ResourceKind, namespace: str, value: str) -> tuple[Object, ...]:
        return self._cache.labelled(kind, namespace, cluster_model.COMPONENT_LABEL, value)

    def _all_nodes(self) -> tuple[Node, ...] | None:
        """All nodes; None if RBAC does not allow to read them."""
        if self._nodes is None and self._settings.watch_nodes:
            self._nodes = tuple(_node(document) for document in self._cache.all(kinds.NODE))
        return self._nodes

    def _forget_nodes(self, kind: ResourceKind, _: Object) -> None:
        if kind == kinds.NODE:
            self._nodes = None


def _node(document: Object) -> Node:
    return Node(
        name=name_of(document),
        labels=labels_of(document),
        taints=tuple(document["spec"].get("taints") or ()),
        allocatable=document["status"].get("allocatable") or {},
    )
