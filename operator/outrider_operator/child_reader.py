"""Read the children of a service: from the cache, and from the API server those that no watch brings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outrider_crds.conditions import find_condition
from outrider_crds.rollout_settings import RolloutStrategy
from outrider_crds.status import ConditionReason, ConditionType

from outrider_operator.api_error import ApiError
from outrider_operator.cache import ObjectCache
from outrider_operator.cluster_model import (
    SERVICE_LABEL,
    KindAccess,
    Object,
    canary_names,
    child_names,
    groups_name,
    is_over_nodes,
    picker_name,
    read_status,
)
from outrider_operator.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    INFERENCE_POOL,
    KUBERNETES_SERVICE,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    ResourceKind,
    child_kind,
)
from outrider_operator.kubernetes_api import KubernetesApi, some_if_possible
from outrider_operator.validation.invalid_input import InvalidInput
from outrider_operator.validation.objects import bounded, trimmed
from outrider_operator.validation.reading import dig, name_of
from outrider_operator.work_queue import Key

Documents = Mapping[tuple[str, str], Object]
"""(kind, name) -> object."""

_POLICY_PAGES = 10
"""Pages of NetworkPolicies that are read per namespace, which users may fill."""
_POLICIES_FOR_S = 30.0
"""Seconds for which a list of NetworkPolicies is reused."""


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
            (kind.kind, name_of(child)): child
            for kind in (CONFIG_MAP, DEPLOYMENT, NETWORK_POLICY)
            for child in self._cache.labelled(kind, key.namespace, SERVICE_LABEL, key.name)
        }

    async def named(self, key: Key, service: Object) -> dict[tuple[str, str], Object]:
        """The children with fixed names, which may lack the label that watches select by."""
        is_canary = dig(service, "spec", "rollout", "strategy") == RolloutStrategy.DRAFT_CANARY
        names = (*child_names(key.name), *(canary_names(key.name) if is_canary else ()))
        return await self._present(key.namespace, [(child_kind(kind), name) for kind, name in names])

    async def gateway(self, key: Key, service: Object) -> Foreign:
        """The InferencePool of the service's name, and the picker's Service; no watch brings either."""
        if not _concerns_a_pool(service):
            return Foreign()
        picker = picker_name(key.name, dig(service, "spec", "gateway", "endpointPicker"))
        return await self._foreign(key.namespace, (INFERENCE_POOL, key.name), (KUBERNETES_SERVICE, picker))

    async def groups(self, key: Key, service: Object, *, has_groups: bool) -> Foreign:
        """The service's LeaderWorkerSet, and the headless Service of its name. No watch brings either: LWS may not be
        installed, and it makes the Service without a label of ours."""
        if not (has_groups or is_over_nodes(service) or read_status(service).nodes is not None):
            return Foreign()
        name = groups_name(key.name)
        return await self._foreign(key.namespace, (LEADER_WORKER_SET, name), (KUBERNETES_SERVICE, name))

    async def read(self, namespace: str, names: Iterable[str]) -> None:
        """Read the contents of ConfigMaps into the cache for the next decision."""
        await asyncio.gather(*(self._read(namespace, name) for name in names))

    async def network_policies(self, namespace: str) -> tuple[Object, ...]:
        """All NetworkPolicies of the namespace, including those without the label that watches select by."""
        at = asyncio.get_running_loop().time()
        self._policies = {name: kept for name, kept in self._policies.items() if at - kept[0] < _POLICIES_FOR_S}
        if namespace not in self._policies:
            documents = await some_if_possible(self._api, NETWORK_POLICY, namespace, pages=_POLICY_PAGES) or ()
            policies = (bounded(NETWORK_POLICY, document) for document in documents)
            self._policies[namespace] = at, tuple(it for it in policies if not isinstance(it, InvalidInput))
        return self._policies[namespace][1]

    async def _read(self, namespace: str, name: str) -> None:
        document = await self._api.get(CONFIG_MAP, namespace, name)
        if document is not None:
            self._cache.completed(CONFIG_MAP, document)
        elif (known := self._cache.get(CONFIG_MAP, namespace, name)) is not None:
            self._cache.gone(CONFIG_MAP, known)

    async def _foreign(self, namespace: str, *names: tuple[ResourceKind, str]) -> Foreign:
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
        self, namespace: str, names: Iterable[tuple[ResourceKind, str]]
    ) -> dict[tuple[str, str], Object]:
        names = tuple(names)
        documents = await asyncio.gather(*(self._child(kind, namespace, name) for kind, name in names))
        by_name = zip(names, documents, strict=True)
        return {(kind.kind, name): document for (kind, name), document in by_name if document is not None}

    async def _child(self, kind: ResourceKind, namespace: str, name: str) -> Object | None:
        """The child, trimmed as in the cache. One that the cache lacks is absent, or validation rejected it."""
        if (known := self._cache.get(kind, namespace, name)) is not None:
            return known
        document = await self._api.get(kind, namespace, name)
        return None if document is None else trimmed(kind, document)


def _concerns_a_pool(service: Object) -> bool:
    """Does it ask for an InferencePool, or may one of its own be left?"""
    if dig(service, "spec", "gateway", "inferencePool") is True:
        return True
    said = find_condition(read_status(service).conditions, ConditionType.INFERENCE_POOL_READY)
    return said is not None and said.reason != ConditionReason.NOT_REQUESTED
