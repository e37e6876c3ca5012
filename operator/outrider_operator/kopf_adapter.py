"""The part of the operator that kopf runs: start-up and clean-up, login, logging.

kopf watches nothing here: its handlers, timers and daemons annotate objects or add finalizers, and a service must be
deletable while the operator is down. docs/explanation/operator.md says what its watches were measured at.
"""

from __future__ import annotations

import logging
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration as ClientConfiguration

from outrider_operator.configuration import OperatorSettings
from outrider_operator.service_controller import ServiceController

# kopf ends the process after the last of these pauses. An API server may be away for long.
_API_RETRY_PAUSES_S = (1, 1, 2, 3, *(5,) * 720)
# Loggers that write a line for every probe and request.
_CHATTY = ("kopf.activities", "aiohttp.access")


def build_registry(controller: ServiceController, client: ClientConfiguration) -> kopf.OperatorRegistry:
    """The handlers in their own registry, since kopf's default registry is global."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry, id="start")
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        await controller.start()

    @kopf.on.cleanup(registry=registry, id="stop")
    async def stop(**_: Any) -> None:
        await controller.stop()

    @kopf.on.login(registry=registry, id="login")
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection_info(client)

    return registry


def configure(settings: kopf.OperatorSettings) -> None:
    settings.networking.error_backoffs = _API_RETRY_PAUSES_S
    # RBAC grants no access to CRDs and namespaces. `ServiceController.start` waits for the CRD.
    settings.scanning.disabled = True


async def connection_info(client: ClientConfiguration) -> kopf.ConnectionInfo:
    """The official client's credentials in kopf's form, so that both use the same cluster."""
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


def configure_logging(settings: OperatorSettings) -> None:
    kopf.configure(
        verbose=settings.log_level == "debug",
        log_format=kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL,
    )
    logging.getLogger().setLevel(settings.log_level.upper())
    if settings.log_level != "debug":
        for chatty in _CHATTY:
            logging.getLogger(chatty).setLevel(logging.WARNING)
