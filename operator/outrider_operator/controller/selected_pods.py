"""Pods of other workloads that services select: a watch and a cache for each selector of a namespace.

One watch of all pods would hold a cluster in memory, and a list by one selector tells nothing of another's pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from outrider_operator.cluster.cache import Key, ObjectCache, ObjectKey
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster_model import MANAGED_BY_LABEL, MANAGER, SERVICE_LABEL, Object, existing_pods
from outrider_operator.controller.watches import Watch
from outrider_operator.kinds import POD, SERVICE, ResourceKind
from outrider_operator.validation.reading import label, name_of, namespace_of

_LOOK_EVERY_S = 0.5
"""Seconds between looks of a new leader for the first lists: once per leadership, so that no event is worth while."""
_FIRST_LIST_S = 5.0
"""Seconds that a new leader waits for the first lists. One takes less than a second; a refused one never comes."""


@dataclass(frozen=True, eq=False)
class _Selection:
    """The pods of one selector, which several services may have."""

    watch: Watch
    task: asyncio.Task[None]
    services: dict[Key, None] = field(default_factory=dict)
    """Services with this selector, the first one first. Their order keeps a condition that names one stable."""

    def pods(self) -> Iterable[Object]:
        return self.watch.cache.all(POD)


class SelectedPods:
    def __init__(self, api: KubernetesApi, services: ObjectCache, changed: Callable[[Key], None]) -> None:
        self._api = api
        self._services = services
        self._changed = changed
        self._followed: dict[Key, _Selection] = {}
        self._shared: dict[tuple[str, str], _Selection] = {}
        """(namespace, selector) -> the selection of the services that have it."""
        self._selections_of: dict[ObjectKey, dict[_Selection, None]] = {}
        """Pod -> selections that have it, the first one first. Its name is the key: a pod that replaces another one of
        the name does so in each selection."""
        self._due = asyncio.Queue[Key]()
        """Services whose selector may have changed."""
        services.subscribe(self._note_service)

    def of(self, key: Key) -> tuple[Object, ...]:
        """The pods that the service selects."""
        selection = self._followed.get(key)
        return tuple(selection.pods()) if selection is not None else ()

    def knows(self, key: Key) -> bool:
        """Were the pods of the service listed? True for a service that selects none."""
        selector, selection = self._selector(key), self._followed.get(key)
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

    def other_services(self, key: Key) -> Mapping[str, str]:
        pods = self.of(key)
        makers = {name_of(pod): label(pod, SERVICE_LABEL) for pod in pods if label(pod, MANAGED_BY_LABEL) == MANAGER}
        others = {name_of(pod): self._first_other(key, _place(pod)) for pod in pods}
        return makers | {name: other.name for name, other in others.items() if other is not None}

    async def run(self) -> None:
        """Follow the selectors of all services until cancelled."""
        self._due = asyncio.Queue()
        for service in self._services.all(SERVICE):
            self._note_service(SERVICE, service)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._follow(await self._due.get(), group)
        finally:
            for known in (self._followed, self._shared, self._selections_of):
                known.clear()

    def _note_service(self, kind: ResourceKind, document: Object) -> None:
        if kind == SERVICE:
            self._due.put_nowait(Key.of(document))

    def _follow(self, key: Key, group: asyncio.TaskGroup) -> None:
        """Let the service have the pods of its present selector."""
        selector, former = self._selector(key), self._followed.get(key)
        if former is not None and former.watch.selector != selector:
            self._leave(key, former)
        if selector and key not in self._followed:
            self._join(key, self._shared.get((key.namespace, selector)) or self._begin(key.namespace, selector, group))

    def _begin(self, namespace: str, selector: str, group: asyncio.TaskGroup) -> _Selection:
        cache = ObjectCache()
        watch = Watch(self._api, cache, POD, namespace, selector)
        selection = _Selection(watch, group.create_task(watch.run(), name=f"pods with {selector} in {namespace}"))
        cache.subscribe(partial(self._note_pod, selection))
        self._shared[namespace, selector] = selection
        return selection

    def _join(self, key: Key, selection: _Selection) -> None:
        self._followed[key] = selection
        selection.services[key] = None
        self._wake([key, *(self._first_other(key, _place(pod)) for pod in selection.pods())])

    def _leave(self, key: Key, selection: _Selection) -> None:
        places = [_place(pod) for pod in selection.pods()]
        self._wake([key, *self._services_of(*places)])
        del self._followed[key], selection.services[key]
        if not selection.services:
            selection.task.cancel()
            del self._shared[key.namespace, selection.watch.selector]
            for place in places:
                self._forget(selection, place)

    def _selector(self, key: Key) -> str:
        """The service's selector as the API takes it; empty if the service makes its pods."""
        existing = existing_pods(self._services.get(SERVICE, key.namespace, key.name))
        return str(existing.pod_selector) if existing is not None else ""

    def _note_pod(self, selection: _Selection, _: ResourceKind, pod: Object) -> None:
        """Wake the services of the selection. Others hear of the pod by their own watches, but not that it has one
        service more, which the first of them names, or one less."""
        place, first = _place(pod), next(iter(selection.services))
        had, has = selection in self._selections_of.get(place, ()), selection.watch.cache.get(POD, *place) is not None
        others: Iterable[Key | None] = ()
        if has and not had:
            self._selections_of.setdefault(place, {})[selection] = None
            others = [self._first_other(first, place)]
        elif had and not has:
            self._forget(selection, place)
            others = self._services_of(place)
        self._wake([*selection.services, *others])

    def _forget(self, selection: _Selection, place: ObjectKey) -> None:
        del self._selections_of[place][selection]
        if not self._selections_of[place]:
            del self._selections_of[place]

    def _services_of(self, *places: ObjectKey) -> Iterator[Key]:
        """Services that select any of the pods."""
        selections = dict.fromkeys(it for place in places for it in self._selections_of.get(place, ()))
        return (key for selection in selections for key in selection.services)

    def _first_other(self, key: Key, place: ObjectKey) -> Key | None:
        """The first other service that selects the pod: the search reads two. A service that joins the pod changes it
        for the first one at most."""
        selections = self._selections_of.get(place, ())
        return next((other for selection in selections for other in selection.services if other != key), None)

    def _wake(self, keys: Iterable[Key | None]) -> None:
        for key in dict.fromkeys(keys):
            if key is not None:
                self._changed(key)


def _place(document: Object) -> ObjectKey:
    return namespace_of(document), name_of(document)
