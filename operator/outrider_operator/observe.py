"""Read everything that one decision needs: a service and all objects that belong to it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from outrider_crds.conditions import find_condition
from outrider_crds.prefetch_report import PrefetchProgress
from outrider_crds.rollout_settings import RolloutStrategy
from outrider_crds.status import ConditionReason, ConditionType

from outrider_operator import kinds
from outrider_operator.cache import ObjectCache
from outrider_operator.cluster_model import (
    COMPONENT_LABEL,
    JOB_NAME_LABEL,
    PREFETCH,
    PROFILE,
    PROFILING,
    REPLICA_WRITER,
    SERVICE_LABEL,
    SHARED_PROFILE,
    ApiRefusal,
    KindAccess,
    Node,
    Object,
    Observed,
    OperatorSettings,
    canary_names,
    child_names,
    groups_name,
    is_over_nodes,
    picker_name,
    read_status,
)
from outrider_operator.decide.job_pods import is_finished, pod_of
from outrider_operator.decide.ownership import owner_uids
from outrider_operator.decide.pod_spec.volumes import profile_shared_as
from outrider_operator.decide.pod_troubles import is_being_created, unschedulable_since
from outrider_operator.kinds import ResourceKind, child_kind
from outrider_operator.kubernetes_api import UNREACHABLE, ApiError, KubernetesApi
from outrider_operator.replica_writers import ReplicaWriter, noted, rivals
from outrider_operator.service_metrics.measurements import Measurements
from outrider_operator.serving_pods import ServingPods
from outrider_operator.validation.invalid_input import InvalidInput
from outrider_operator.validation.objects import bounded, trimmed
from outrider_operator.validation.reading import (
    component,
    condition_of,
    controller_uid,
    created_s,
    dig,
    label,
    labels_of,
    name_of,
    namespace_of,
    text,
    uid_of,
    unix_seconds,
)
from outrider_operator.work_queue import Key

logger = logging.getLogger(__name__)

_MAX_EVENT_READS = 4
"""Pods or Jobs whose events are read per reconcile. Conditions name one, and a rollout may have hundreds of pods."""
_POLICY_PAGES = 10
"""Pages of NetworkPolicies that are read per namespace, which users may fill."""
_POLICIES_FOR_S = 30.0
"""Seconds for which a list of NetworkPolicies is reused."""
_NODE_IS_MADE = frozenset({"TriggeredScaleUp", "Nominated"})
"""Reasons of events by which the cluster-autoscaler and Karpenter announce a node."""
_NO_NODE_IS_MADE = frozenset({"NotTriggerScaleUp", "FailedScaleUp", "FailedToScaleUpGroup"})
"""Reasons of events by which the cluster-autoscaler says that it adds no node."""
_KARPENTER = "karpenter"
"""Reporter of Karpenter's events. When it adds no node, its event has the scheduler's reason."""
_AWAITED_S = 900.0
"""Age from which a Job of another namespace is not waited for: it may have no room."""
_LATE_S = 10.0
"""Age from which the events of a pod without a container are read. Most pods have one by then."""


@dataclass(frozen=True)
class _Policies:
    """NetworkPolicies of a namespace, and the event loop's time when they were read."""

    read_at: float
    documents: tuple[Object, ...]


@dataclass(frozen=True)
class _Foreign:
    """Objects of other projects' kinds."""

    access: KindAccess
    documents: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """(kind, name) -> object."""


class Observer:
    """Reads the cache, and from the API server only children that the cache lacks."""

    def __init__(
        self,
        api: KubernetesApi,
        cache: ObjectCache,
        pods: ServingPods,
        measurements: Measurements,
        settings: OperatorSettings,
        *,
        watch_nodes: bool,
    ) -> None:
        self._api = api
        self._cache = cache
        self._pods = pods
        self._measurements = measurements
        self._settings = settings
        self._watch_nodes = watch_nodes
        self._nodes: tuple[Node, ...] | None = None
        self._policies: dict[str, _Policies] = {}
        self._replica_writers: dict[Key, tuple[ReplicaWriter, ...]] = {}
        cache.subscribe(self._forget_nodes)

    async def observe(self, service: Object, refusals: tuple[ApiRefusal, ...], *, is_new: bool = False) -> Observed:
        """Everything that a decision about `service` needs. A new service's first reconcile makes no requests, so that
        a hundred new services do not wait for each other."""
        key = Key(namespace_of(service), name_of(service))
        pods = self._pods.documents(key)
        jobs = self._of_component(kinds.JOB, key.namespace, PROFILING)
        job_pods = self._of_component(kinds.POD, key.namespace, PROFILING)
        unreachable = self._measurements.unreachable(key)
        prefetch_jobs = self._of_service(kinds.JOB, key, PREFETCH)
        prefetch_pods = self._of_service(kinds.POD, key, PREFETCH)
        own_jobs = [job for job in (*jobs, *prefetch_jobs) if uid_of(service) in owner_uids(job)]
        workers = self._pods.workers(key)
        waiting = _without_container((*pods, *workers), own_jobs, (*job_pods, *prefetch_pods))
        pending = [pod for pod in (*pods, *workers) if unschedulable_since(pod) is not None]
        children = await self._children(key, () if is_new else _names_of(service))
        gateway = _Foreign(KindAccess.UNKNOWN) if is_new else await self._gateway(key, service)
        groups = _Foreign(KindAccess.UNKNOWN) if is_new else await self._groups(key, service)
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
            warnings=await self._from_events(key.namespace, waiting, current_warning),
            provisioning=await self._from_events(key.namespace, pending, node_in_the_making),
            states=self._measurements.states(key),
            unreachable=unreachable,
            network_policies=await self._network_policies(key.namespace) if unreachable else (),
            jobs=jobs,
            prefetch_jobs=prefetch_jobs,
            prefetch_pods=prefetch_pods,
            prefetch_progress=await self._progress(prefetch_pods),
            job_pods=job_pods,
            profiles={
                name_of(profile): profile for profile in self._of_component(kinds.CONFIG_MAP, key.namespace, PROFILE)
            },
            shared_profiles=self._shared_profiles(),
            measured_elsewhere=self._measured_elsewhere(key.namespace),
            figures=self._measurements.figures(key, service),
            refusals=refusals,
            replica_rivals=rivals(self._note_replica_writer(key, service)),
        )

    def forget(self, key: Key) -> None:
        """Remove what is kept about a service that is gone."""
        self._replica_writers.pop(key, None)

    def _note_replica_writer(self, key: Key, service: Object) -> tuple[ReplicaWriter, ...]:
        before = self._replica_writers.get(key, ())
        turns = self._replica_writers[key] = noted(before, text(service, REPLICA_WRITER), time.time())
        return turns

    def _shared_profiles(self) -> dict[str, Object]:
        """Return them by the names that they have elsewhere, where the label means nothing: anyone may put it on."""
        if not self._settings.profiles_shared_from:
            return {}
        shared = self._of_component(kinds.CONFIG_MAP, self._settings.namespace, SHARED_PROFILE)
        return {profile_shared_as(name_of(profile)): profile for profile in shared}

    def _measured_elsewhere(self, namespace: str) -> frozenset[str]:
        """Jobs whose results this namespace will use. Of two trusted namespaces that began the same Job, the first
        measures. Its place does not depend on its age: each would delete the other's pending Job in turn."""
        trusted = self._settings.profiles_shared_from
        own = self._active_jobs(namespace, within_s=math.inf) if namespace in trusted else {}
        others = (self._active_jobs(other, within_s=_AWAITED_S) for other in trusted if other != namespace)
        return frozenset(
            name for jobs in others for name, order in jobs.items() if name not in own or order < own[name]
        )

    def _active_jobs(self, namespace: str, *, within_s: float) -> dict[str, tuple[float, str]]:
        """Name -> place in the order of Jobs, for the namespace's unfinished Jobs that are younger than `within_s`."""
        jobs = self._of_component(kinds.JOB, namespace, PROFILING)
        return {
            name_of(job): (created_s(job), namespace) for job in jobs if not is_finished(job) and _age_s(job) < within_s
        }

    async def read(self, namespace: str, names: Iterable[str]) -> None:
        """Read the contents of ConfigMaps into the cache for the next decision."""
        await asyncio.gather(*(self._read(namespace, name) for name in names))

    async def _read(self, namespace: str, name: str) -> None:
        document = await self._api.get(kinds.CONFIG_MAP, namespace, name)
        if document is not None:
            self._cache.completed(kinds.CONFIG_MAP, document)
        elif (known := self._cache.get(kinds.CONFIG_MAP, namespace, name)) is not None:
            self._cache.gone(kinds.CONFIG_MAP, known)

    async def _children(self, key: Key, names: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], Object]:
        """Children by (kind, name). Those in `names` may lack the label that watches select by, so they are read."""
        children = {
            (kind.kind, name_of(child)): child
            for kind in (kinds.CONFIG_MAP, kinds.DEPLOYMENT, kinds.NETWORK_POLICY)
            for child in self._labelled(kind, key)
        }
        named = await asyncio.gather(*(self._child(child_kind(kind), key.namespace, name) for kind, name in names))
        return children | {which: child for which, child in zip(names, named, strict=True) if child is not None}

    async def _child(self, kind: ResourceKind, namespace: str, name: str) -> Object | None:
        """The child, trimmed as in the cache. One that the cache lacks is absent, or validation rejected it."""
        if (known := self._cache.get(kind, namespace, name)) is not None:
            return known
        document = await self._api.get(kind, namespace, name)
        return None if document is None else trimmed(kind, document)

    async def _gateway(self, key: Key, service: Object) -> _Foreign:
        """The InferencePool of the service's name, and the picker's Service; no watch brings either."""
        if not _concerns_a_pool(service):
            return _Foreign(KindAccess.UNKNOWN)
        picker = picker_name(key.name, dig(service, "spec", "gateway", "endpointPicker"))
        return await self._foreign(key.namespace, (kinds.INFERENCE_POOL, key.name), (kinds.KUBERNETES_SERVICE, picker))

    async def _groups(self, key: Key, service: Object) -> _Foreign:
        """The service's LeaderWorkerSet, and the headless Service of its name. No watch brings either: LWS may not be
        installed, and it makes the Service without a label of ours."""
        may_have_one = self._pods.has_groups(key) or read_status(service).nodes is not None
        if not (is_over_nodes(service) or may_have_one):
            return _Foreign(KindAccess.UNKNOWN)
        name = groups_name(key.name)
        return await self._foreign(key.namespace, (kinds.LEADER_WORKER_SET, name), (kinds.KUBERNETES_SERVICE, name))

    async def _foreign(self, namespace: str, *names: tuple[ResourceKind, str]) -> _Foreign:
        """The objects with these names, if the first one's kind is installed and may be read."""
        try:
            if not await self._api.serves(names[0][0]):
                return _Foreign(KindAccess.NOT_INSTALLED)
            documents = await asyncio.gather(*(self._child(kind, namespace, name) for kind, name in names))
        except ApiError as error:
            if error.forbidden:
                return _Foreign(KindAccess.FORBIDDEN)
            raise
        keys = [(kind.kind, name) for kind, name in names]
        present = {key: document for key, document in zip(keys, documents, strict=True) if document is not None}
        return _Foreign(KindAccess.SERVED, present)

    async def _network_policies(self, namespace: str) -> tuple[Object, ...]:
        """All NetworkPolicies of the namespace, including those without the label that watches select by."""
        at = asyncio.get_running_loop().time()
        self._policies = {name: read for name, read in self._policies.items() if at - read.read_at < _POLICIES_FOR_S}
        if namespace not in self._policies:
            documents = await self._some(kinds.NETWORK_POLICY, namespace, pages=_POLICY_PAGES) or ()
            policies = (bounded(kinds.NETWORK_POLICY, document) for document in documents)
            self._policies[namespace] = _Policies(
                at, tuple(policy for policy in policies if not isinstance(policy, InvalidInput))
            )
        return self._policies[namespace].documents

    async def _from_events(
        self, namespace: str, subjects: list[Object], read: Callable[[list[Object], Object], str]
    ) -> dict[str, str]:
        """Name -> sentence that `read` finds in the events of pods and Jobs that have waited for long."""
        sentences: dict[str, str] = {}
        late = [subject for subject in subjects if _age_s(subject) >= _LATE_S]
        for subject in late[:_MAX_EVENT_READS]:
            events = await self._some(kinds.EVENT, namespace, f"involvedObject.uid={uid_of(subject)}")
            if events is None:
                break
            if sentence := read(events, subject):
                sentences[name_of(subject)] = sentence
        return sentences

    async def _some(self, kind: ResourceKind, namespace: str, fields: str = "", pages: int = 1) -> list[Object] | None:
        """Objects on the first `pages`; None on an error: a better sentence is not worth a failed reconcile."""
        try:
            return await self._api.some(kind, namespace, fields=fields, pages=pages)
        except (ApiError, *UNREACHABLE) as error:
            logger.warning("Cannot read the %s of %s: %r", kind.plural, namespace, error)
            return None

    def _labelled(self, kind: ResourceKind, key: Key) -> tuple[Object, ...]:
        return self._cache.labelled(kind, key.namespace, SERVICE_LABEL, key.name)

    def _of_service(self, kind: ResourceKind, key: Key, value: str) -> tuple[Object, ...]:
        """Objects of the service whose component label is `value`."""
        return tuple(document for document in self._labelled(kind, key) if component(document) == value)

    async def _progress(self, pods: Iterable[Object]) -> PrefetchProgress | None:
        """What the running pod of a prefetch Job reports."""
        addresses = (text(pod, "status", "podIP") for pod in pods if text(pod, "status", "phase") == "Running")
        address = next(filter(None, addresses), "")
        return await self._measurements.prefetch(address) if address else None

    def _of_component(self, kind: ResourceKind, namespace: str, value: str) -> tuple[Object, ...]:
        return self._cache.labelled(kind, namespace, COMPONENT_LABEL, value)

    def _all_nodes(self) -> tuple[Node, ...] | None:
        """All nodes; None if RBAC does not allow to read them."""
        if self._nodes is None and self._watch_nodes:
            self._nodes = tuple(_node(document) for document in self._cache.all(kinds.NODE))
        return self._nodes

    def _forget_nodes(self, kind: ResourceKind, _: Object) -> None:
        if kind == kinds.NODE:
            self._nodes = None


def _concerns_a_pool(service: Object) -> bool:
    """Does it ask for an InferencePool, or may one of its own be left?"""
    if dig(service, "spec", "gateway", "inferencePool") is True:
        return True
    said = find_condition(read_status(service).conditions, ConditionType.INFERENCE_POOL_READY)
    return said is not None and said.reason != ConditionReason.NOT_REQUESTED


def _names_of(service: Object) -> tuple[tuple[str, str], ...]:
    """(kind, name) of children with fixed names that `service` may have."""
    is_canary = dig(service, "spec", "rollout", "strategy") == RolloutStrategy.DRAFT_CANARY
    return (*child_names(name_of(service)), *(canary_names(name_of(service)) if is_canary else ()))


def current_warning(events: Iterable[Object], subject: Object) -> str:
    """The newest event of `subject` (a pod or Job) if it is a warning; else empty.

    Warnings that no longer apply are ignored: the pod has a node now, or its volume could be mounted after all.
    """
    placed = condition_of(subject, "PodScheduled")
    since_s = unix_seconds(text(placed, "lastTransitionTime")) if placed.get("status") == "True" else None
    current = [event for event in events if not _is_over(event, is_placed=since_s is not None, since_s=since_s)]
    newest = max(current, key=lambda event: (_event_s(event), event.get("type") == "Warning"), default={})
    is_warning = newest.get("type") == "Warning"
    return f"{newest.get('reason', '')}: {newest.get('message', '')}" if is_warning else ""


def node_in_the_making(events: Iterable[Object], _pod: Object) -> str:
    """The last event of an autoscaler about `_pod` if it announces a node; else empty."""
    words = [event for event in events if _is_of_autoscaler(event)]
    newest = max(words, key=_event_s, default={})
    return f"{newest['reason']}: {newest.get('message', '')}" if newest.get("reason") in _NODE_IS_MADE else ""


def _is_of_autoscaler(event: Object) -> bool:
    reporter = dig(event, "source", "component") or event.get("reportingComponent")
    return event.get("reason") in _NODE_IS_MADE | _NO_NODE_IS_MADE or reporter == _KARPENTER


def _is_over(event: Object, *, is_placed: bool, since_s: float | None) -> bool:
    if is_placed and event.get("reason") == "FailedScheduling":
        return True
    return since_s is not None and _event_s(event) < since_s


def _event_s(event: Object) -> float:
    """Unix time of the event's last occurrence in whole seconds, the precision of some clients."""
    times = (dig(event, "series", "lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((unix_seconds(str(moment)) or 0.0) // 1 for moment in times)


def _without_container(pods: tuple[Object, ...], jobs: list[Object], job_pods: tuple[Object, ...]) -> list[Object]:
    """Pods without a container and Jobs without a pod: only their events tell what delays them."""
    mine = {uid_of(job) for job in jobs}
    created = [*pods, *(pod for pod in job_pods if controller_uid(pod) in mine)]
    by_job: defaultdict[str, list[Object]] = defaultdict(list)  # an index, since users may create thousands of both
    for pod in job_pods:
        by_job[label(pod, JOB_NAME_LABEL)].append(pod)
    podless = [job for job in jobs if not is_finished(job) and pod_of(job, by_job[name_of(job)]) is None]
    return [*(pod for pod in created if is_being_created(pod)), *podless]


def _node(document: Object) -> Node:
    return Node(
        name=name_of(document),
        labels=labels_of(document),
        taints=tuple(document["spec"].get("taints") or ()),
        allocatable=document["status"].get("allocatable") or {},
    )


def _age_s(pod: Object) -> float:
    return time.time() - (unix_seconds(pod["metadata"].get("creationTimestamp", "")) or 0.0)
