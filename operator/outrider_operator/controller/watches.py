"""Keep the cache up to date by one list-and-watch loop per kind and namespace.

kopf's own watches were measured against these: docs/explanation/operator.md has the figures and the faults.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from outrider_operator import cluster_model
from outrider_operator.cluster.api_error import UNREACHABLE, ApiError
from outrider_operator.cluster.cache import ObjectCache, ObjectKey
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.configuration import OperatorSettings
from outrider_operator.controller.supervision import Backoff
from outrider_operator.kinds import CHILDREN, CONFIG_MAP, NODE, SERVICE, STATEFUL_SET, ResourceKind
from outrider_operator.operator_metrics import telemetry
from outrider_operator.validation.reading import InvalidInput, name_of, namespace_of

logger = logging.getLogger(__name__)

CHILD_SELECTOR = f"{cluster_model.MANAGED_BY_LABEL}={cluster_model.MANAGER}"
SHARED_PROFILE_SELECTOR = f"{CHILD_SELECTOR},{cluster_model.COMPONENT_LABEL}={cluster_model.SHARED_PROFILE}"
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
_LONGEST_REASON = 500


async def relist(
    api: KubernetesApi, cache: ObjectCache, kind: ResourceKind, namespace: str | None, selector: str = ""
) -> str:
    """Read all objects into the cache. Returns the resource version to watch from."""
    present, seen_at = set[ObjectKey](), ""
    async for page in api.pages(kind, namespace, selector):
        for document in page.objects:
            present.add((namespace_of(document), name_of(document)))
            cache.seen(kind, document)
        seen_at = page.version
    cache.listed(kind, namespace, present, int(seen_at))
    return seen_at


def _selector(kind: ResourceKind) -> str:
    """Selector of the children of `kind`. A LeaderWorkerSet's controller puts no label of ours on its StatefulSets."""
    return cluster_model.GROUPS_LABEL if kind == STATEFUL_SET else CHILD_SELECTOR


class Watches:
    """The loops over services, children (by label) and, if RBAC allows, nodes."""

    def __init__(self, api: KubernetesApi, cache: ObjectCache, settings: OperatorSettings) -> None:
        self._loops = []
        for scope in settings.watch_namespaces or (None,):
            children = (Watch(api, cache, kind, scope, _selector(kind)) for kind in CHILDREN)
            self._loops += [Watch(api, cache, SERVICE, scope), *children]
        elsewhere = settings.watch_namespaces and settings.namespace not in settings.watch_namespaces
        if settings.profiling_shared_from and elsewhere:
            self._loops.append(Watch(api, cache, CONFIG_MAP, settings.namespace, SHARED_PROFILE_SELECTOR))
        if settings.watch_nodes:
            self._loops.append(Watch(api, cache, NODE, None))

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {f"watch of {loop.name}": loop.run for loop in self._loops}

    async def listed(self) -> None:
        """Wait until every kind was listed once. Before that, a child that is not in the cache may exist.

        A refused list counts as well: the namespace or its Role is gone, and other namespaces need not wait.
        """
        for loop in self._loops:
            await loop.answered.wait()

    def knows(self, namespace: str) -> bool:
        """Was every kind in `namespace` listed?"""
        return all(loop.listed.is_set() for loop in self._loops if loop.namespace in (None, namespace))

    def unlisted(self) -> list[str]:
        return [loop.name for loop in self._loops if not loop.listed.is_set()]


@dataclass(eq=False)
class Watch:
    """The loop over one kind: list, then follow changes. It lists again only if changes may have been lost."""

    api: KubernetesApi
    cache: ObjectCache
    kind: ResourceKind
    namespace: str | None
    selector: str = ""
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    version: str | None = None
    """Resource version to watch from; None: it lists first."""
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the list is complete, or was refused."""

    @property
    def name(self) -> str:
        return f"{self.kind.plural} in {self.namespace or 'all namespaces'}"

    async def run(self) -> None:
        while True:
            why = await self._attempt()
            pause_s = self.backoff.next_s()
            if why is not None:
                telemetry.WATCH_RESTARTS.labels(kind=self.kind.kind).inc()
                logger.warning("Lost the watch of %s, trying again in %.1f s: %s", self.name, pause_s, why)
            await asyncio.sleep(pause_s)

    async def _attempt(self) -> str | None:
        """List if necessary, and follow one stream. Returns the error; None if the server ended the stream."""
        try:
            if self.version is None:
                self.version = await relist(self.api, self.cache, self.kind, self.namespace, self.selector)
                self.listed.set()
                self.answered.set()
            await self._follow(self.version)
        except UNREACHABLE as error:
            return repr(error)  # the watch can continue from the same version
        except ApiError as error:
            self.version = None
            if error.forbidden or error.not_found:
                self.answered.set()
            return None if error.expired else str(error)
        except Exception as error:  # a watch from the same version would fail again
            self.version = None
            return repr(error)[:_LONGEST_REASON]
        return None

    async def _follow(self, version: str) -> None:
        is_complete = True
        try:
            async for news in self.api.watch(self.kind, self.namespace, self.selector, version):
                if isinstance(news, InvalidInput):
                    telemetry.count_invalid(news)
                    is_complete = False
                else:
                    self._take(*news)
        finally:
            if not is_complete:
                self.version = None  # list, but only now: users must not be able to force lists at will

    def _take(self, event: str, document: cluster_model.Object) -> None:
        if event == "DELETED":
            self.cache.left(self.kind, document)
        elif event in ("ADDED", "MODIFIED"):
            self.cache.seen(self.kind, document)
        self.version = document["metadata"]["resourceVersion"]
        self.backoff.reset()  # not after a list: the stream that follows it may fail each time
