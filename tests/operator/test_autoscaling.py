"""The demand of a service moves its replicas, through a real HPA and the service's scale subresource."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from setup import binaries
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
        wait_for("a demand of all", lambda: any(demand > 0.8 * (MOST - 1) for demand in _demands(service)))
        service.patch({"engine": {"env": manifests.environment(tokens_per_s=10)}})
        wait_for("fewer replicas", lambda: service.read()["spec"]["replicas"] == 1)
    wait_for("a demand of one", lambda: any(demand <= 0.8 for demand in _demands(service)))


def _demands(service: Service) -> list[float]:
    """Replicas that the load takes, by the status; none while nothing is measured."""
    return [float(demand["replicas"]) for demand in service.read()["status"].get("demand", [])]


def test_two_writers_of_replicas_are_named(cluster: Cluster, make: Make) -> None:
    """A manifest in Git and an autoscaler: each write is a good one, and is carried out."""
    service = make("contested", replicas=1, profiling={"mode": "Skip"})
    service.wait_updated()
    for manager, replicas in (("autoscaler", 2), ("git", 1), ("autoscaler", 2), ("git", 1)):
        patch = f'{{"spec": {{"replicas": {replicas}}}}}'
        arguments = (service.name, "-n", service.namespace, "--type=merge", "-p", patch)
        cluster.kubectl("patch", "specsvc", *arguments, f"--field-manager={manager}")
        wait_for("the operator's look", lambda: _is_seen(service))
    assert "autoscaler and git set spec.replicas in turn" in service.condition("SpecValid")["message"]
    service.wait_updated()
    wait_for("one pod", lambda: len(service.pods()) == 1)


def _is_seen(service: Service) -> bool:
    document = service.read()
    seen: bool = document["status"]["observedGeneration"] == document["metadata"]["generation"]
    return seen


def test_keda_takes_the_scaled_object_of_the_examples(cluster: Cluster) -> None:
    """The API server checks it against KEDA's own schema, unknown fields included. (KEDA itself does not run here.)"""
    crd = str(binaries.scaled_object_crd())
    cluster.kubectl("apply", "--server-side", "-f", crd)
    try:
        example = yaml.safe_load((EXAMPLES / "keda-scaledobject.yaml").read_text())
        taken = wait_for("the API server to serve it", lambda: _answer_with_schema(cluster, example))
        assert taken.returncode == 0, taken.stderr
        misspelled = {**example, "spec": {**example["spec"], "minReplicas": 1}}
        assert 'unknown field "spec.minReplicas"' in _dry_run(cluster, misspelled).stderr
    finally:
        cluster.kubectl("delete", "-f", crd)


def _answer_with_schema(cluster: Cluster, document: dict[str, Any]) -> subprocess.CompletedProcess[str] | None:
    """The verdict on it; None while its kind is not served yet."""
    done = _dry_run(cluster, document)
    unknown = ("no matches for kind", "could not find the requested resource")
    return None if any(words in done.stderr for words in unknown) else done


def _dry_run(cluster: Cluster, document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    arguments = ("apply", "--dry-run=server", "--validate=strict", "-n", "default", "-f", "-")
    document = {**document, "metadata": {"name": document["metadata"]["name"]}}
    return cluster.try_kubectl(*arguments, stdin=yaml.safe_dump(document))
