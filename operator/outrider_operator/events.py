"""Events about services: what changed in their conditions, for `kubectl describe`."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from outrider_operator.inbound.reading import cut, name_of, namespace_of, text, uid_of
from outrider_operator.kinds import EVENT, SERVICE
from outrider_operator.kubernetes_api import UNREACHABLE, ApiError, KubernetesApi
from outrider_operator.model import Object
from outrider_operator.plan import Event

logger = logging.getLogger(__name__)

_COMPONENT = "outrider"
_MOST_CHARACTERS = 1024
"""Of a message; the API server takes no more."""


class Events:
    """Posts each once: an Event is not worth a second attempt, least of all in a namespace that goes."""

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
    now = datetime.now(UTC).isoformat(timespec="seconds")
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
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
