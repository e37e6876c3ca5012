"""kopf's part: start-up and clean-up, login, liveness, logging, Events, and the watch of the services.

Only `on.event` watches objects. A create, update or delete handler, a timer or a daemon would make kopf
annotate the objects or add a finalizer, and a service must be deletable while the operator is down.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import kopf
from kubernetes.aio.client.configuration import Configuration as ClientConfiguration

from outrider_operator.configuration import Configuration
from outrider_operator.kinds import SERVICE
from outrider_operator.kubernetes_api import PAGE_SIZE
from outrider_operator.model import Object

# kopf gives up (and ends the process) after the last of these; an API server may be away for long.
_API_RETRY_PAUSES_S = (1, 1, 2, 3, *(5,) * 720)
# A line for every event, probe and request.
_CHATTY = ("kopf.objects", "kopf.activities", "aiohttp.access")


class Operator(Protocol):
    """What the frame drives."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def service_seen(self, document: Object) -> None: ...

    def service_gone(self, document: Object) -> None: ...

    def health(self) -> dict[str, Any]: ...


class Events:
    """Posts Kubernetes Events about services through kopf's queue."""

    def __init__(self) -> None:
        self._context: contextvars.Context | None = None
        self._early: list[Callable[[], None]] = []

    def use_current_context(self) -> None:
        """kopf hands its queue to handlers in context variables; keep them for the work outside of handlers."""
        if self._context is None:
            self._context = contextvars.copy_context()
            for post in self._early:
                self._context.run(post)

    def post(self, service: Object, *, warning: bool, reason: str, message: str) -> None:
        """Queue an Event; before kopf has shown its first service, for later."""
        body, level = kopf.Body(cast(Any, service)), "Warning" if warning else "Normal"
        post = partial(kopf.event, body, type=level, reason=reason, message=message)
        if self._context is None:
            self._early.append(post)
        else:
            self._context.run(post)


def build_registry(operator: Operator, events: Events, client: ClientConfiguration) -> kopf.OperatorRegistry:
    """The handlers, in a registry of their own (kopf's default one is a global)."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry, id="start")
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        await operator.start()

    @kopf.on.cleanup(registry=registry, id="stop")
    async def stop(**_: Any) -> None:
        await operator.stop()

    @kopf.on.login(registry=registry, id="login")
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection_info(client)

    @kopf.on.probe(registry=registry, id="operator")
    def health(**_: Any) -> dict[str, Any]:
        return operator.health()

    @kopf.on.event(SERVICE.group, SERVICE.version, SERVICE.plural, registry=registry, id="service")
    async def service_event(event: kopf.RawEvent, **_: Any) -> None:
        events.use_current_context()
        handle = operator.service_gone if event["type"] == "DELETED" else operator.service_seen
        handle(dict(event["object"]))

    return registry


def configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.loggers = False
    settings.posting.default_backoffs = (1, 5)  # an Event is not worth more, least of all in a namespace that goes
    settings.posting.reporting_component = "outrider"
    settings.posting.event_name_prefix = "outrider-"
    settings.networking.error_backoffs = _API_RETRY_PAUSES_S
    settings.watching.server_timeout = 300
    settings.watching.chunk_size = PAGE_SIZE  # a service may weigh 1.5 MB: all at once are the operator's memory
    # Handlers of events need nothing that kopf keeps on objects, and anyone may write there what it cannot read.
    settings.persistence.diffbase_storage = kopf.MultiDiffBaseStorage([])
    settings.persistence.progress_storage = kopf.MultiProgressStorage([])
    # RBAC gives no verb on CRDs and namespaces; the start waits for the CRD itself.
    settings.scanning.disabled = True


async def connection_info(client: ClientConfiguration) -> kopf.ConnectionInfo:
    """The official client's credentials in kopf's form: both talk to the same cluster, whatever the place."""
    header = await client.get_api_key_with_prefix("BearerToken")
    scheme, _, token = (header or "").partition(" ")
    return kopf.ConnectionInfo(
        server=client.host,
        ca_path=client.ssl_ca_cert,
        insecure=not client.verify_ssl,
        certificate_path=client.cert_file,
        private_key_path=client.key_file,
        scheme=scheme.capitalize() or None,
        token=token or None,
    )


def configure_logging(configuration: Configuration) -> None:
    kopf.configure(
        verbose=configuration.log_level == "debug",
        log_format=kopf.LogFormat.JSON if configuration.log_format == "json" else kopf.LogFormat.FULL,
    )
    logging.getLogger().setLevel(configuration.log_level.upper())
    if configuration.log_level != "debug":
        for chatty in _CHATTY:
            logging.getLogger(chatty).setLevel(logging.WARNING)
