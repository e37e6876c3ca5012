"""Post Kubernetes Events about changed conditions of services, which `kubectl describe` shows."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from outrider_operator.api_error import UNREACHABLE, ApiError
from outrider_operator.cluster_model import Object
from outrider_operator.kinds import EVENT, SERVICE
from outrider_operator.kubernetes_api import KubernetesApi
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
