"""The pod template of the serving Deployment. It is rendered once per revision and stored with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider_crds import runtime_config
from outrider_crds.base import seconds
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.rollout_settings import Rollout
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import REVISION_LABEL, Object, OperatorSettings, hot_map_name
from outrider_operator.decide.ownership import labels
from outrider_operator.decide.pod_spec.container import container, pod_fields
from outrider_operator.decide.pod_spec.patch import RUNTIME, patched
from outrider_operator.decide.pod_spec.placement import scheduling
from outrider_operator.decide.pod_spec.volumes import (
    adapter_volumes,
    configuration_volumes,
    model_volumes,
    scratch_volumes,
)
from outrider_operator.validation.reading import integer, items, text

CONTAINER = RUNTIME
_STARTUP_PERIOD_S = 2
_ENDPOINT_REMOVAL_S = 5
"""Seconds before the container gets its signal, in which the Service stops sending new connections."""
_CONNECTION_GRACE_S = 2
"""Seconds in which it then answers with `Connection: close`, so that clients with open connections move on."""
_SHUTDOWN_MARGIN_S = 15


@dataclass(frozen=True)
class PodTimes:
    """Limits of a pod's start and end, which are fixed for its life."""

    startup_probes: int
    """Start-up probes that may fail."""
    grace_s: int
    """Seconds between the deletion and the end of the pod."""

    def cover(self, needed: PodTimes) -> bool:
        return self.startup_probes >= needed.startup_probes and self.grace_s >= needed.grace_s


def pod_times(rollout: Rollout) -> PodTimes:
    """Limits from the spec: progressDeadline bounds the start of a pod, drainTimeout its end."""
    return PodTimes(
        startup_probes=max(1, math.ceil(seconds(rollout.progress_deadline) / _STARTUP_PERIOD_S)),
        grace_s=_ENDPOINT_REMOVAL_S + math.ceil(seconds(rollout.drain_timeout)) + _SHUTDOWN_MARGIN_S,
    )


def times_of(template: Object) -> PodTimes:
    """Limits in a pod template; 0 where a template of another release does not have them."""
    runtime = next((c for c in items(template, "spec", "containers") if text(c, "name") == CONTAINER), {})
    return PodTimes(
        startup_probes=integer(runtime, "startupProbe", "failureThreshold"),
        grace_s=integer(template, "spec", "terminationGracePeriodSeconds"),
    )


def pod_template(
    spec: SpeculativeServiceSpec,
    settings: OperatorSettings,
    service: str,
    revision: str,
    image: str,
    keys: list[ProfileKeys],
    hot_map: str = "",
) -> Object:
    """The pod template of `revision` as this release renders it. It is stored with the revision and never changes.

    hot_map: name of the ConfigMap with the hot config, if it is not the service's own.
    """
    volumes = [
        *configuration_volumes(f"{service}-{revision}", hot_map or hot_map_name(service), keys),
        *model_volumes(spec),
        *adapter_volumes(spec),
        *scratch_volumes(),
    ]
    times = pod_times(spec.rollout)
    pod = {
        **pod_fields(spec, settings, volumes),
        **scheduling(spec, spec.accelerator.products),
        "serviceAccountName": service,
        "terminationGracePeriodSeconds": times.grace_s,
        "containers": [{**container(spec, settings, CONTAINER, image, volumes), **_program(spec, times)}],
    }
    return {"metadata": _metadata(spec, service, revision), "spec": patched(pod, spec.pod_template, CONTAINER)}


def _program(spec: SpeculativeServiceSpec, times: PodTimes) -> Object:
    """Command, ports and probes of the serving container."""
    drain_s = math.ceil(seconds(spec.rollout.drain_timeout))
    drain = ["--drain-grace", f"{_CONNECTION_GRACE_S}s", "--drain-timeout", f"{drain_s}s"]
    ports = {"http": runtime_config.SERVING_PORT, "admin": runtime_config.ADMIN_PORT}
    return {
        "command": ["outrider-runtime"],
        "args": ["serve", "--config", runtime_config.BOOT_FILE, *drain],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "lifecycle": {"preStop": {"sleep": {"seconds": _ENDPOINT_REMOVAL_S}}},
        "startupProbe": _probe(runtime_config.READY_PATH, _STARTUP_PERIOD_S, times.startup_probes),
        "readinessProbe": _probe(runtime_config.READY_PATH, 5, 3),
        "livenessProbe": _probe(runtime_config.LIVE_PATH, 10, 6),
    }


def _metadata(spec: SpeculativeServiceSpec, service: str, revision: str) -> Object:
    products = spec.accelerator.products
    annotations = dict(spec.pod_template.annotations)
    if len(products) == 1:  # the product is known before the pod has a node, so the pod need not wait for it
        annotations[runtime_config.PRODUCT_ANNOTATION] = products[0]
    own = {**spec.pod_template.labels, **labels(service), REVISION_LABEL: revision}
    return {"labels": own, "annotations": annotations}


def _probe(path: str, period_s: int, failures: int) -> Object:
    """Start-up may take the rollout's whole deadline; liveness starts after it and tolerates a slow pod."""
    get = {"path": path, "port": "admin", "scheme": "HTTP"}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}
