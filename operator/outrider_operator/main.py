"""`outrider-operator`: the operator's process, which the Helm chart runs."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any, cast

import kopf
import prometheus_client
from outrider_crds.rules import compile_rules

from outrider_operator import http_page, kopf_adapter
from outrider_operator.configuration import ConfigurationError, OperatorSettings, read_settings
from outrider_operator.decide import decide
from outrider_operator.kubernetes_api import KubernetesApi, load_configuration
from outrider_operator.lease import Lease, LoopThread
from outrider_operator.operator_metrics.status_metrics import ServiceStatusMetrics
from outrider_operator.service_controller import ServiceController

logger = logging.getLogger(__name__)


def main() -> None:
    """Run until a signal. Exit status 1 after a failure or for an invalid configuration."""
    try:
        settings = read_settings()
    except ConfigurationError as error:
        sys.exit(f"outrider-operator: {error}")
    kopf_adapter.configure_logging(settings)
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
                registry=kopf_adapter.build_registry(controller, client),
                # kopf's default identity needs the user's name, and a platform may assign a user without one.
                identity=cast(Any, settings.pod_name),
                standalone=True,  # the Lease replaces kopf's peering, which needs its own CRDs
                clusterwide=True,  # kopf watches nothing
            )
    finally:
        await api.close()
        await lease_thread.run(lease_api.close())
    return controller.failed
