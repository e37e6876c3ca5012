"""Write the status subresource, and post the Events about its changes, which `kubectl describe` shows.

Changed conditions are written at once, changed figures every 15 s.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.cluster.api_error import UNREACHABLE, ApiError
from outrider_operator.cluster.apply import ObserveAgain
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster_model import REPLICA_WRITER, Object
from outrider_operator.decide.status_changes import status_write
from outrider_operator.kinds import EVENT, SERVICE
from outrider_operator.plan import Event
from outrider_operator.validation.reading import cut, name_of, namespace_of, text, uid_of

logger = logging.getLogger(__name__)

_COMPONENT = "outrider"
_MOST_CHARACTERS = 1024
"""Characters of an Event's message that the API server accepts."""


class Events:
    """Posts Events. A failed one is not retried."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    async def post(self, service: Object, event: Event) -> None:
        try:
            await self._api.create(_document(service, event))
        except (ApiError, *UNREACHABLE) as error:
            where = f"{namespace_of(service)}/{name_of(service)}"
            if not (isinstance(error, ApiError) and error.namespace_ends):
                logger.warning("Cannot post the Event %s of %s: %s", event.reason, where, error or repr(error))


def _document(service: Object, event: Event) -> Object:
    timestamp = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"generateName": f"{_COMPONENT}-", "namespace": namespace_of(service)},
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": cut(event.message, _MOST_CHARACTERS),
        "involvedObject": {
            "apiVersion": SERVICE.api_version,
            "kind": SERVICE.kind,
            "name": name_of(service),
            "namespace": namespace_of(service),
            "uid": uid_of(service),
            "resourceVersion": text(service, "metadata", "resourceVersion"),
        },
        "source": {"component": _COMPONENT},
        "firstTimestamp": timestamp,
        "lastTimestamp": timestamp,
        "count": 1,
    }


class StatusWriter:
    """The only writer of statuses."""

    def __init__(self, api: KubernetesApi, cache: ObjectCache) -> None:
        self._api = api
        self._cache = cache
        self._written_at: dict[Key, float] = {}

    def forget(self, key: Key) -> None:
        self._written_at.pop(key, None)

    async def write(
        self, service: Object, before: SpeculativeServiceStatus, after: SpeculativeServiceStatus
    ) -> float | None:
        """Write the status if it changed. Returns the seconds until changed figures may be written, if they must wait.

        Raises ObserveAgain if the object changed meanwhile.
        """
        key, at = Key.of(service), asyncio.get_running_loop().time()
        decided = status_write(before, after, at, self._written_at.get(key))
        if decided.is_due:
            await self._replace(service, after.wire())
            self._written_at[key] = at
        return decided.again_in_s

    async def _replace(self, service: Object, status: Object) -> None:
        sent = {name: value for name, value in service.items() if name != REPLICA_WRITER}
        try:
            self._cache.wrote(SERVICE, await self._api.replace({**sent, "status": status}, "status"))
        except ApiError as error:
            if error.conflict:  # the watch brings the newer state
                raise ObserveAgain(f"{name_of(service)} changed since it was observed") from None
            if not error.not_found:
                raise
            self._cache.gone(SERVICE, service)
