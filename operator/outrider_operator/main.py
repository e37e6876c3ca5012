"""`outrider-operator`: the process that the Helm chart runs."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any, cast

import kopf
import prometheus_client

from outrider_operator import frame, http_page, metrics_page
from outrider_operator.condition_metrics import DraftCanaries, ServiceConditions
from outrider_operator.configuration import Configuration, ConfigurationError, read_configuration
from outrider_operator.controller import Controller
from outrider_operator.decide import decide
from outrider_operator.demand_metrics import ServiceDemand
from outrider_operator.kubernetes_api import KubernetesApi, load_configuration
from outrider_operator.model import Settings

logger = logging.getLogger(__name__)


def main() -> None:
    """Run until a signal; exit status 2 for a configuration that cannot be used, 1 after a failure."""
    try:
        configuration = read_configuration(os.environ)
    except ConfigurationError as error:
        sys.exit(f"outrider-operator: {error}")
    frame.configure_logging(configuration)
    failed = asyncio.run(_run(configuration))
    sys.exit(1 if failed else 0)


async def _run(configuration: Configuration) -> bool:
    """True when the operator ended by itself."""
    client = await load_configuration()
    api = KubernetesApi(client)
    controller = Controller(configuration, api, settings_of(configuration), decide)
    prometheus_client.REGISTRY.register(ServiceConditions(controller.services))
    prometheus_client.REGISTRY.register(ServiceDemand(controller.services))
    prometheus_client.REGISTRY.register(DraftCanaries(controller.services))
    try:
        async with (
            metrics_page.serving(configuration.metrics_port),
            http_page.serving_health(configuration.health_port, controller.health),
        ):
            await kopf.operator(
                registry=frame.build_registry(controller, client),
                # kopf's own choice asks for the user's name: a platform may assign a user that has none.
                identity=cast(Any, configuration.pod_name),
                standalone=True,  # the Lease takes the place of kopf's peering, which needs CRDs of its own
                clusterwide=True,  # it watches nothing
            )
    finally:
        await api.close()
    return controller.failed


def settings_of(configuration: Configuration) -> Settings:
    return Settings(
        runtime_image=configuration.runtime_image,
        runtime_upgrade_percent=configuration.runtime_upgrade_percent,
        runtime_cpu_image=configuration.runtime_cpu_image,
        image_pull_policy=configuration.image_pull_policy,
        allowed_host_paths=configuration.allowed_host_paths,
        admin_port_peers=configuration.admin_port_peers,
        platform_assigns_user=configuration.platform_assigns_user,
        prometheus_configured=bool(configuration.prometheus_url),
        profiling_priority_class=configuration.profiling_priority_class,
        window_s=configuration.metrics_window_s,
        unschedulable_s=configuration.no_capacity_after_s,
        namespace=configuration.namespace,
        profiles_shared_from=configuration.profiles_shared_from,
        engine_version=configuration.engine_version,
        engine_version_cpu=configuration.engine_version_cpu,
    )
