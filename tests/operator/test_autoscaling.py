"""The demand of a service moves its replicas, through a real HPA and the service's scale subresource."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.operator import manifests
from tests.operator.client import Service, wait_for
from tests.operator.conftest import Make
from tests.operator.external_metrics import ExternalMetrics
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples" / "autoscaling"
AT_ONCE = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 4, "periodSeconds": 15}]}
MOST = 3


def _hpa(service: Service) -> dict[str, Any]:
    """The example's, for `service`, in a hurry."""
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / "hpa-external.yaml").read_text())
    document["metadata"] = {"name": service.name, "namespace": service.namespace}
    spec = document["spec"]
    spec |= {"maxReplicas": MOST, "behavior": {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}}
    spec["scaleTargetRef"]["name"] = service.name
    spec["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]["outrider_service"] = service.name
    return document


def test_hpa_follows_the_demand_up_and_down(
    cluster: Cluster, make: Make, operator_process: OperatorProcess, tmp_path: Path
) -> None:
    """Load up, replicas up; load down, replicas down."""
    url = f"http://127.0.0.1:{operator_process.metrics_port}/metrics"
    service = make("scaled", standin={"tokens_per_s": 1_500})
    with ExternalMetrics(cluster, url, tmp_path):
        cluster.apply(_hpa(service))
        wait_for("more replicas", lambda: service.read()["spec"].get("replicas", 1) == MOST)
        service.wait_updated()
        assert float(service.read()["status"]["demand"][0]["replicas"]) > 0.8 * (MOST - 1)
        service.patch({"engine": {"env": manifests.environment(tokens_per_s=20)}})
        wait_for("fewer replicas", lambda: service.read()["spec"]["replicas"] == 1)
    assert float(service.read()["status"]["demand"][0]["replicas"]) <= 0.8
