"""Write the status subresource: changed conditions at once, changed figures every 15 s."""

from __future__ import annotations

import asyncio

from outrider_crds.status import SpeculativeServiceStatus

from outrider_operator.api_error import ApiError
from outrider_operator.apply import ObserveAgain
from outrider_operator.cache import ObjectCache
from outrider_operator.cluster_model import REPLICA_WRITER, Object
from outrider_operator.decide.status_changes import status_write
from outrider_operator.kinds import SERVICE
from outrider_operator.kubernetes_api import KubernetesApi
from outrider_operator.validation.reading import name_of
from outrider_operator.work_queue import Key


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
