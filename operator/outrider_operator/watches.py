"""Keeps the cache up to date: one list-and-watch loop per kind and namespace, restarted with back-off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from outrider_operator import telemetry
from outrider_operator.cache import Cache
from outrider_operator.kinds import CHILDREN, NODE, Kind
from outrider_operator.kubernetes_api import UNREACHABLE, ApiError, KubernetesApi

logger = logging.getLogger(__name__)

MANAGED_BY = "app.kubernetes.io/managed-by"
CHILD_SELECTOR = f"{MANAGED_BY}=outrider"
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0


class Watches:
    """The loops over all children (by label) and, where RBAC allows, over nodes."""

    def __init__(self, api: KubernetesApi, cache: Cache, namespaces: tuple[str, ...], watch_nodes: bool) -> None:
        scopes: tuple[str | None, ...] = namespaces or (None,)
        self._loops = [_Loop(api, cache, kind, namespace, CHILD_SELECTOR) for kind in CHILDREN for namespace in scopes]
        if watch_nodes:
            self._loops.append(_Loop(api, cache, NODE, None, ""))

    async def run(self) -> None:
        """Run all loops until cancelled."""
        async with asyncio.TaskGroup() as group:
            for loop in self._loops:
                group.create_task(loop.run(), name=f"watch of {loop.name}")

    async def listed(self) -> None:
        """Wait until every kind was listed once: before that, an absent child may only be unseen."""
        for loop in self._loops:
            await loop.listed.wait()

    @property
    def names(self) -> Iterable[str]:
        return [loop.name for loop in self._loops]


class _Loop:
    def __init__(self, api: KubernetesApi, cache: Cache, kind: Kind, namespace: str | None, selector: str) -> None:
        self._api = api
        self._cache = cache
        self._kind = kind
        self._namespace = namespace
        self._selector = selector
        self.listed = asyncio.Event()

    @property
    def name(self) -> str:
        return f"{self._kind.plural} in {self._namespace or 'all namespaces'}"

    async def run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._list()
                pause_s = _FIRST_PAUSE_S
                await self._watch()
            except ApiError as error:
                if not error.expired:
                    logger.warning("Cannot watch %s, trying again in %.1f s: %s", self.name, pause_s, error)
            except (*UNREACHABLE, ValueError) as error:  # ValueError: a line that is cut off, or no JSON
                logger.warning("Lost the watch of %s, trying again in %.1f s: %r", self.name, pause_s, error)
            telemetry.WATCH_RESTARTS.labels(kind=self._kind.kind).inc()
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    async def _list(self) -> None:
        documents, self._version = await self._api.list_all(self._kind, self._namespace, self._selector)
        self._cache.relisted(self._kind, self._namespace, documents)
        self.listed.set()

    async def _watch(self) -> None:
        """Follow the events; a stream that the server ended in good order goes on from the last version."""
        while True:
            stream = self._api.watch(self._kind, self._namespace, self._selector, self._version)
            async for event, document in stream:
                self._version = document["metadata"]["resourceVersion"]
                if event == "DELETED":
                    self._cache.gone(self._kind, document)
                elif event in ("ADDED", "MODIFIED"):
                    self._cache.seen(self._kind, document)
            await asyncio.sleep(_FIRST_PAUSE_S)
