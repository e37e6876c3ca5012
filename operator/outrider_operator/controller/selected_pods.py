"""Pods of other workloads that services select: a watch and a cache for each such service.

One watch of all pods would hold a cluster in memory, and a list by one selector tells nothing of another's pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster_model import MANAGED_BY_LABEL, MANAGER, SERVICE_LABEL, Object, existing_pods
from outrider_operator.controller.watches import Watch
from outrider_operator.kinds import POD, SERVICE, ResourceKind
from outrider_operator.validation.reading import label, name_of, namespace_of, uid_of

_LOOK_EVERY_S = 0.5
_FIRST_LIST_S = 5.0


@dataclass(frozen=True)
class _Selection:
    cache: ObjectCache
    watch: Watch
    task: asyncio.Task[None]

    def has(self, pod: Object) -> bool:
        same = self.cache.get(POD, namespace_of(pod), name_of(pod))
        return same is not None and uid_of(same) == uid_of(pod)


class SelectedPods:
    def __init__(self, api: KubernetesApi, services: ObjectCache, changed: Callable[[Key], None]) -> None:
        self._api = api
        self._services = services
        self._changed = changed
        self._selections: dict[Key, _Selection] = {}

    def of(self, key: Key) -> tuple[Object, ...]:
        """The pods that the service selects."""
        selection = self._selections.get(key)
        return tuple(selection.cache.all(POD)) if selection is not None else ()

    def knows(self, key: Key) -> bool:
        """Were the pods of the service listed? True for a service that selects none."""
        selector, selection = self._selector(key), self._selections.get(key)
        if not selector:
            return True
        return selection is not None and selection.watch.selector == selector and selection.watch.listed.is_set()

    async def listed(self) -> None:
        """Wait until the pods of all services were listed, for some seconds at most: a namespace may be gone.

        Until then no pod has answered, and the conditions of a new leader would differ for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LIST_S):
                while not all(self.knows(Key.of(service)) for service in self._services.all(SERVICE)):
                    await asyncio.sleep(_LOOK_EVERY_S)

    def rivals(self, key: Key) -> Mapping[str, str]:
        """Pod name -> another service that selects it, or that made it."""
        pods = self.of(key)
        makers = {name_of(pod): label(pod, SERVICE_LABEL) for pod in pods if label(pod, MANAGED_BY_LABEL) == MANAGER}
        selectors = {name_of(pod): other.name for pod in pods for other in self._others(key, pod)}
        return {**makers, **selectors}

    async def run(self) -> None:
        """Follow the selectors of all services until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._follow(group)
                    await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            self._selections.clear()

    def _follow(self, group: asyncio.TaskGroup) -> None:
        keys = map(Key.of, self._services.all(SERVICE))
        selectors = {key: selector for key in keys if (selector := self._selector(key))}
        for key, selection in list(self._selections.items()):
            if selectors.get(key) != selection.watch.selector:
                self._selections.pop(key).task.cancel()
                for pod in selection.cache.all(POD):
                    self._wake(key, POD, pod)
        for key in selectors.keys() - self._selections.keys():
            cache = ObjectCache()
            cache.subscribe(partial(self._wake, key))
            watch = Watch(self._api, cache, POD, key.namespace, selectors[key])
            self._selections[key] = _Selection(cache, watch, group.create_task(watch.run(), name=f"pods of {key}"))

    def _selector(self, key: Key) -> str:
        """The service's selector as the API takes it; empty if the service makes its pods."""
        existing = existing_pods(self._services.get(SERVICE, key.namespace, key.name))
        return str(existing.pod_selector) if existing is not None else ""

    def _wake(self, key: Key, _: ResourceKind, pod: Object) -> None:
        for user in (key, *self._others(key, pod)):
            self._changed(user)

    def _others(self, key: Key, pod: Object) -> list[Key]:
        """Other services that select the pod."""
        others = (other for other in self._selections if other.namespace == namespace_of(pod) and other != key)
        return [other for other in others if self._selections[other].has(pod)]
