"""`outrider-operator`: the operator's process, which the Helm chart runs. kopf starts and stops it, logs in and logs.

kopf watches nothing here: its handlers, timers and daemons annotate objects or add finalizers, and a service must be
deletable while the operator is down. docs/explanation/operator.md says what its watches were measured at.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any, cast

import kopf
import prometheus_client
from kubernetes.aio.client.configuration import Configuration as ClientConfiguration
from outrider_crds.rules import compile_rules

from outrider_operator import http_page
from outrider_operator.cluster.kubernetes_api import KubernetesApi, load_configuration
from outrider_operator.cluster.lease import Lease, LoopThread
from outrider_operator.configuration import ConfigurationError, OperatorSettings, read_settings
from outrider_operator.controller.service_controller import ServiceController
from outrider_operator.decide import decide
from outrider_operator.operator_metrics.status_metrics import ServiceStatusMetrics

logger = logging.getLogger(__name__)
# kopf ends the process after the last of these pauses. An API server may be away for long.
_API_RETRY_PAUSES_S = (1, 1, 2, 3, *(5,) * 720)
# Loggers that write a line for every probe and request.
_CHATTY = ("kopf.activities", "aiohttp.access")


def main() -> None:
    """Run until a signal. Exit status 1 after a failure or for an invalid configuration."""
    try:
        settings = read_settings()
    except ConfigurationError as error:
        sys.exit(f"outrider-operator: {error}")
    configure_logging(settings)
    compile_rules()  # before the event loop, which must not stand still for a second
    failed = asyncio.run(_run(settings))
    sys.exit(1 if failed else 0)


async def _run(settings: OperatorSettings) -> bool:
    """Run the operator. True if it ended by itself."""
    client = await load_configuration()
    api, lease_api = KubernetesApi(client), KubernetesApi(await load_configuration())
    lease_thread = LoopThread("lease")
    lease = Lease(lease_thread, lease_api, settings.namespace, settings.lease_name, settings.pod_name)
    controller = ServiceController(settings, api, lease, decide)
    prometheus_client.REGISTRY.register(ServiceStatusMetrics(controller.services))
    try:
        async with (
            http_page.serving_metrics(settings.metrics_port),
            http_page.serving_health(settings.health_port, controller.health, controller.is_stuck),
        ):
            await kopf.operator(
                registry=build_registry(controller, client),
                # kopf's default identity needs the user's name, and a platform may assign a user without one.
                identity=cast(Any, settings.pod_name),
                standalone=True,  # the Lease replaces kopf's peering, which needs its own CRDs
                clusterwide=True,  # kopf watches nothing
            )
    finally:
        await api.close()
        await lease_thread.run(lease_api.close())
    return controller.failed


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
