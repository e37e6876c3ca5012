"""Read what no watch brings: children without our label, objects of other projects, and Events of what waits.

Events are the only place that tells what delays a pod or Job, and whether a node is being made for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from outrider_crds.conditions import ConditionReason, ConditionType, find_condition
from outrider_crds.rollout_settings import RolloutStrategy

from outrider_operator import cluster_model, kinds
from outrider_operator.cluster.api_error import ApiError
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi, some_if_possible
from outrider_operator.cluster_model import KindAccess, Object
from outrider_operator.decide.pods.job_pods import is_finished, pod_of
from outrider_operator.decide.pods.pod_troubles import is_being_created
from outrider_operator.validation import reading
from outrider_operator.validation.objects import bounded, trimmed

Documents = Mapping[tuple[str, str], Object]
"""(kind, name) -> object."""

_POLICY_PAGES = 10
"""Pages of NetworkPolicies that are read per namespace, which users may fill."""
_POLICIES_FOR_S = 30.0
"""Seconds for which a list of NetworkPolicies is reused."""
_MAX_READS = 4
"""Pods or Jobs whose events are read per reconcile. Conditions name one, and a rollout may have hundreds of pods."""
_NODE_IS_MADE = frozenset({"TriggeredScaleUp", "Nominated"})
"""Reasons of events by which the cluster-autoscaler and Karpenter announce a node."""
_NO_NODE_IS_MADE = frozenset({"NotTriggerScaleUp", "FailedScaleUp", "FailedToScaleUpGroup"})
"""Reasons of events by which the cluster-autoscaler says that it adds no node."""
_KARPENTER = "karpenter"
"""Reporter of Karpenter's events. When it adds no node, its event has the scheduler's reason."""
_LATE_S = 10.0
"""Age from which the events of a pod without a container are read. Most pods have one by then."""
ReadSentence = Callable[[list[Object], Object], str]
"""Finds a sentence in the events of a pod or Job; empty without one."""


@dataclass(frozen=True)
class Foreign:
    """Objects of other projects' kinds."""

    access: KindAccess = KindAccess.UNKNOWN
    documents: Documents = field(default_factory=dict)


class ChildReader:
    def __init__(self, api: KubernetesApi, cache: ObjectCache) -> None:
        self._api = api
        self._cache = cache
        self._policies: dict[str, tuple[float, tuple[Object, ...]]] = {}
        """Namespace -> time of the event loop, and its NetworkPolicies then."""

    def labelled(self, key: Key) -> dict[tuple[str, str], Object]:
        """The children that have the service's label. Makes no request."""
        return {
            (kind.kind, reading.name_of(child)): child
            for kind in (kinds.CONFIG_MAP, kinds.DEPLOYMENT, kinds.NETWORK_POLICY)
            for child in self._cache.labelled(kind, key.namespace, cluster_model.SERVICE_LABEL, key.name)
        }

    async def named(self, key: Key, service: Object) -> dict[tuple[str, str], Object]:
        """The children with fixed names, which may lack the label that watches select by."""
        if cluster_model.existing_pods(service) is not None:
            return await self._present(
                key.namespace, [(kinds.CONFIG_MAP, cluster_model.config_file_map_name(key.name))]
            )
        is_canary = reading.dig(service, "spec", "rollout", "strategy") == RolloutStrategy.DRAFT_CANARY
        names = (*cluster_model.child_names(key.name), *(cluster_model.canary_names(key.name) if is_canary else ()))
        return await self._present(key.namespace, [(kinds.child_kind(kind), name) for kind, name in names])

    async def gateway(self, key: Key, service: Object) -> Foreign:
        """The InferencePool of the service's name, and the picker's Service; no watch brings either."""
        if not _concerns_a_pool(service):
            return Foreign()
        picker = cluster_model.picker_name(key.name, reading.dig(service, "spec", "gateway", "endpointPicker"))
        return await self._foreign(key.namespace, (kinds.INFERENCE_POOL, key.name), (kinds.KUBERNETES_SERVICE, picker))

    async def groups(self, key: Key, service: Object, *, has_groups: bool) -> Foreign:
        """The service's LeaderWorkerSet, and the headless Service of its name. No watch brings either: LWS may not be
        installed, and it makes the Service without a label of ours."""
        if not (
            has_groups or cluster_model.is_over_nodes(service) or cluster_model.read_status(service).nodes is not None
        ):
            return Foreign()
        name = cluster_model.groups_name(key.name)
        return await self._foreign(key.namespace, (kinds.LEADER_WORKER_SET, name), (kinds.KUBERNETES_SERVICE, name))

    async def read(self, namespace: str, names: Iterable[str]) -> None:
        """Read the contents of ConfigMaps into the cache for the next decision."""
        await asyncio.gather(*(self._read(namespace, name) for name in names))

    async def network_policies(self, namespace: str) -> tuple[Object, ...]:
        """All NetworkPolicies of the namespace, including those without the label that watches select by."""
        at = asyncio.get_running_loop().time()
        self._policies = {name: kept for name, kept in self._policies.items() if at - kept[0] < _POLICIES_FOR_S}
        if namespace not in self._policies:
            documents = await some_if_possible(self._api, kinds.NETWORK_POLICY, namespace, pages=_POLICY_PAGES) or ()
            policies = (bounded(kinds.NETWORK_POLICY, document) for document in documents)
            self._policies[namespace] = at, tuple(it for it in policies if not isinstance(it, reading.InvalidInput))
        return self._policies[namespace][1]

    async def _read(self, namespace: str, name: str) -> None:
        document = await self._api.get(kinds.CONFIG_MAP, namespace, name)
        if document is not None:
            self._cache.completed(kinds.CONFIG_MAP, document)
        elif (known := self._cache.get(kinds.CONFIG_MAP, namespace, name)) is not None:
            self._cache.gone(kinds.CONFIG_MAP, known)

    async def _foreign(self, namespace: str, *names: tuple[kinds.ResourceKind, str]) -> Foreign:
        """The objects with these names, if the first one's kind is installed and may be read."""
        try:
            if not await self._api.serves(names[0][0]):
                return Foreign(KindAccess.NOT_INSTALLED)
            return Foreign(KindAccess.SERVED, await self._present(namespace, names))
        except ApiError as error:
            if error.forbidden:
                return Foreign(KindAccess.FORBIDDEN)
            raise

    async def _present(
        self, namespace: str, names: Iterable[tuple[kinds.ResourceKind, str]]
    ) -> dict[tuple[str, str], Object]:
        names = tuple(names)
        documents = await asyncio.gather(*(self._child(kind, namespace, name) for kind, name in names))
        by_name = zip(names, documents, strict=True)
        return {(kind.kind, name): document for (kind, name), document in by_name if document is not None}

    async def _child(self, kind: kinds.ResourceKind, namespace: str, name: str) -> Object | None:
        """The child, trimmed as in the cache. One that the cache lacks is absent, or validation rejected it."""
        if (known := self._cache.get(kind, namespace, name)) is not None:
            return known
        document = await self._api.get(kind, namespace, name)
        return None if document is None else trimmed(kind, document)


def _concerns_a_pool(service: Object) -> bool:
    """Does it ask for an InferencePool, or may one of its own be left?"""
    if reading.dig(service, "spec", "gateway", "inferencePool") is True:
        return True
    said = find_condition(cluster_model.read_status(service).conditions, ConditionType.INFERENCE_POOL_READY)
    return said is not None and said.reason != ConditionReason.NOT_REQUESTED


async def read_sentences(
    api: KubernetesApi, namespace: str, subjects: Iterable[Object], read: ReadSentence
) -> dict[str, str]:
    """Name -> sentence that `read` finds in the events of `subjects` that have waited for long."""
    sentences: dict[str, str] = {}
    late = [subject for subject in subjects if time.time() - reading.created_s(subject) >= _LATE_S]
    for subject in late[:_MAX_READS]:
        events = await some_if_possible(
            api, kinds.EVENT, namespace, fields=f"involvedObject.uid={reading.uid_of(subject)}"
        )
        if events is None:
            break
        if sentence := read(events, subject):
            sentences[reading.name_of(subject)] = sentence
    return sentences


def current_warning(events: Iterable[Object], subject: Object) -> str:
    """The newest event of `subject` (a pod or Job) if it is a warning; else empty.

    Warnings that no longer apply are ignored: the pod has a node now, or its volume could be mounted after all.
    """
    placed = reading.condition_of(subject, "PodScheduled")
    since_s = (
        reading.unix_seconds(reading.text(placed, "lastTransitionTime")) if placed.get("status") == "True" else None
    )
    current = [event for event in events if since_s is None or not _is_over(event, since_s)]
    newest = max(current, key=lambda event: (_event_s(event), event.get("type") == "Warning"), default={})
    is_warning = newest.get("type") == "Warning"
    return f"{newest.get('reason', '')}: {newest.get('message', '')}" if is_warning else ""


def node_in_the_making(events: Iterable[Object], _pod: Object) -> str:
    """The last event of an autoscaler about `_pod` if it announces a node; else empty."""
    newest = max((event for event in events if _is_of_autoscaler(event)), key=_event_s, default={})
    return f"{newest['reason']}: {newest.get('message', '')}" if newest.get("reason") in _NODE_IS_MADE else ""


def without_container(pods: Iterable[Object], jobs: list[Object], job_pods: Iterable[Object]) -> list[Object]:
    """Pods without a container and Jobs without a pod: only their events tell what delays them."""
    by_job: defaultdict[str, list[Object]] = defaultdict(list)  # an index, since users may create thousands of both
    for pod in job_pods:
        by_job[reading.label(pod, cluster_model.JOB_NAME_LABEL)].append(pod)
    mine = {reading.uid_of(job) for job in jobs}
    created = [*pods, *(pod for pod in job_pods if reading.controller_uid(pod) in mine)]
    podless = [job for job in jobs if not is_finished(job) and pod_of(job, by_job[reading.name_of(job)]) is None]
    return [*(pod for pod in created if is_being_created(pod)), *podless]


def _is_of_autoscaler(event: Object) -> bool:
    reporter = reading.dig(event, "source", "component") or event.get("reportingComponent")
    return event.get("reason") in _NODE_IS_MADE | _NO_NODE_IS_MADE or reporter == _KARPENTER


def _is_over(event: Object, placed_s: float) -> bool:
    return event.get("reason") == "FailedScheduling" or _event_s(event) < placed_s


def _event_s(event: Object) -> float:
    """Unix time of the event's last occurrence in whole seconds, the precision of some clients."""
    times = (reading.dig(event, "series", "lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((reading.unix_seconds(str(moment)) or 0.0) // 1 for moment in times)
