"""The pod template of the serving Deployment. It is rendered once for a revision and kept with it."""

from __future__ import annotations

import math

from outrider_crds.base import seconds
from outrider_crds.profile import ProfileKeys
from outrider_crds.runtime_config import (
    ADMIN_PORT,
    BOOT_FILE,
    LIVE_PATH,
    PRODUCT_ANNOTATION,
    READY_PATH,
    SERVING_PORT,
)
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.decide.ownership import labels
from outrider_operator.decide.pod_spec.container import container, pod_fields
from outrider_operator.decide.pod_spec.placement import scheduling
from outrider_operator.decide.pod_spec.volumes import configuration_volumes, model_volumes, scratch_volumes
from outrider_operator.model import REVISION_LABEL, Object, Settings, hot_map_name

CONTAINER = "runtime"
_STARTUP_PERIOD_S = 2
_ENDPOINT_REMOVAL_S = 5
"""The container hears of its end only after this time, when the Service sends it no new connections."""
_CONNECTION_GRACE_S = 2
"""Then it answers with `Connection: close` for so long, so that clients with open connections move on in order."""
_SHUTDOWN_MARGIN_S = 15


def pod_template(
    spec: SpeculativeServiceSpec, settings: Settings, service: str, revision: str, image: str, keys: list[ProfileKeys]
) -> Object:
    """Pods of `revision`, as this release renders them. It is kept with the revision: nothing else may move it."""
    volumes = [
        *configuration_volumes(f"{service}-{revision}", hot_map_name(service), keys),
        *model_volumes(spec),
        *scratch_volumes(),
    ]
    drain_s = math.ceil(seconds(spec.rollout.drain_timeout))
    runtime = {
        **container(spec, settings, CONTAINER, image, volumes),
        "command": ["outrider-runtime"],
        "args": [
            "serve",
            "--config",
            BOOT_FILE,
            "--drain-grace",
            f"{_CONNECTION_GRACE_S}s",
            "--drain-timeout",
            f"{drain_s}s",
        ],
        "ports": [
            {"name": "http", "containerPort": SERVING_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "lifecycle": {"preStop": {"sleep": {"seconds": _ENDPOINT_REMOVAL_S}}},
        **_probes(seconds(spec.rollout.progress_deadline)),
    }
    return {
        "metadata": _metadata(spec, service, revision),
        "spec": {
            **pod_fields(spec, settings, volumes),
            **scheduling(spec, spec.accelerator.products),
            **_serving_only(spec),
            "serviceAccountName": service,
            "terminationGracePeriodSeconds": _ENDPOINT_REMOVAL_S + drain_s + _SHUTDOWN_MARGIN_S,
            "containers": [runtime],
        },
    }


def _metadata(spec: SpeculativeServiceSpec, service: str, revision: str) -> Object:
    products = spec.accelerator.products
    annotations = dict(spec.pod_template.annotations)
    if len(products) == 1:  # known before the pod has a node: it need not learn until it is annotated
        annotations[PRODUCT_ANNOTATION] = products[0]
    return {
        "labels": {**spec.pod_template.labels, **labels(service), REVISION_LABEL: revision},
        "annotations": annotations,
    }


def _serving_only(spec: SpeculativeServiceSpec) -> Object:
    template = spec.pod_template
    fields = {
        "priorityClassName": template.priority_class_name,
        "topologySpreadConstraints": [constraint.wire() for constraint in template.topology_spread_constraints],
    }
    return {name: value for name, value in fields.items() if value}


def _probes(startup_s: float) -> Object:
    """Start-up has the rollout's whole deadline; liveness only counts from then on, and lets a busy pod be slow."""

    def probe(path: str, period_s: int, failures: int) -> Object:
        return {
            "httpGet": {"path": path, "port": "admin", "scheme": "HTTP"},
            "periodSeconds": period_s,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": probe(READY_PATH, _STARTUP_PERIOD_S, max(1, math.ceil(startup_s / _STARTUP_PERIOD_S))),
        "readinessProbe": probe(READY_PATH, 5, 3),
        "livenessProbe": probe(LIVE_PATH, 10, 6),
    }
