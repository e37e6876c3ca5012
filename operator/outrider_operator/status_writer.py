"""Writes the status subresource: conditions at once, figures rarely, nothing when nothing changed."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider_crds.status import ConditionType, SpeculativeServiceStatus

from outrider_operator.apply import ObserveAgain
from outrider_operator.cache import Cache
from outrider_operator.kinds import SERVICE, name_of, namespace_of
from outrider_operator.kubernetes_api import ApiError, KubernetesApi
from outrider_operator.model import Object
from outrider_operator.work_queue import Key

FIGURES_EVERY_S = 15.0
_FIGURES = ("summary", "goodput", "sloClasses", "drafts")
_MEASURED = (ConditionType.SPECULATION_ACTIVE, ConditionType.GOODPUT_HEALTHY, ConditionType.SLO_ATTAINED)


class StatusWriter:
    """The only writer of statuses."""

    def __init__(self, api: KubernetesApi, cache: Cache) -> None:
        self._api = api
        self._cache = cache
        self._figures_written_at: dict[Key, float] = {}

    def forget(self, key: Key) -> None:
        self._figures_written_at.pop(key, None)

    async def write(self, service: Object, status: SpeculativeServiceStatus) -> float | None:
        """Write what changed; figures that must wait are due after the returned time in seconds.

        Raises ObserveAgain where another wrote the object first.
        """
        before, after = service.get("status") or {}, status.wire()
        if after == before:
            return None
        key = Key(namespace_of(service), name_of(service))
        if _without_figures(after) == _without_figures(before) and (due_in_s := self._due_in(key)) > 0:
            return due_in_s
        await self._replace(service, after)
        self._figures_written_at[key] = asyncio.get_running_loop().time()
        return None

    def _due_in(self, key: Key) -> float:
        written_at = self._figures_written_at.get(key)
        if written_at is None:
            return 0.0
        return written_at + FIGURES_EVERY_S - asyncio.get_running_loop().time()

    async def _replace(self, service: Object, status: Object) -> None:
        try:
            self._cache.wrote(SERVICE, await self._api.replace({**service, "status": status}, "status"))
        except ApiError as error:
            if error.conflict:
                await self._read_again(service)
                raise ObserveAgain(f"{name_of(service)} changed since it was observed") from None
            if error.not_found:
                self._cache.gone(SERVICE, service)
                return
            raise

    async def _read_again(self, service: Object) -> None:
        fresh = await self._api.get(SERVICE, namespace_of(service), name_of(service))
        if fresh is None:
            self._cache.gone(SERVICE, service)
        else:
            self._cache.seen(SERVICE, fresh)


def _without_figures(status: Object) -> Any:
    """What must be written at once: not the figures, nor the sentences that quote them."""
    conditions = [
        {**condition, "message": ""} if condition["type"] in _MEASURED else condition
        for condition in status.get("conditions", [])
    ]
    return {**{name: value for name, value in status.items() if name not in _FIGURES}, "conditions": conditions}
