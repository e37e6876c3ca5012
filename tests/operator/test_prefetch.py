"""`modelCache.pvc` on a real cluster: one Job fills the claim, and pods wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from outrider_operator.kinds import DEPLOYMENT, JOB, POD

from tests.cluster.cluster import Cluster
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster

SKIP = {"profiling": {"mode": "Skip"}}
TARGET = {"target": {"name": "tests/hub-model"}}


@pytest.fixture
def claim(cluster: Cluster, namespace: str) -> Callable[[str], dict[str, Any]]:
    """Makes a claim with a volume of the node's behind it; returns the field that names it."""

    def make(name: str) -> dict[str, Any]:
        volume = f"{namespace}-{name}"
        common: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        path = {"path": f"/srv/{volume}", "type": "DirectoryOrCreate"}
        spec = {**common, "capacity": {"storage": "1Gi"}, "hostPath": path}
        cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
        metadata = {"name": name, "namespace": namespace}
        claim_spec = {**common, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
        kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        cluster.apply({**kind, "metadata": metadata, "spec": claim_spec})
        return {"modelCache": {"pvc": {"claimName": name}}}

    return make


def test_pods_wait_for_one_download_that_reports_progress(
    make: Make, claim: Callable[[str], dict[str, Any]], client: Client, cluster: Cluster
) -> None:
    """Three pods, one download; the figures come from the Job's own pod."""
    service = make("filling", standin={"prefetch": "wait"}, replicas=3, **claim("cache"), **TARGET, **SKIP)
    service.wait("Progressing", "True", "WaitingForModels")
    wait_for("progress", partial(_says, service, "3Gi of 12Gi (25%)"))
    assert service.read()["status"]["prefetch"]["phase"] == "Downloading"
    assert client.get(DEPLOYMENT, service.namespace, service.name) is None
    (pod,) = client.list(POD, service.namespace, "outrider.dev/service=filling,outrider.dev/component=prefetch")
    cluster.kubectl("exec", "-n", service.namespace, pod["metadata"]["name"], "--", "touch", "/var/cache/outrider/go")
    service.wait("Updated", "True")
    assert service.read()["status"]["prefetch"]["phase"] == "Complete"
    (serving, *_) = service.pods()
    run = ("exec", "-n", service.namespace, serving["metadata"]["name"], "--", "cat", "/var/cache/outrider/downloads")
    assert cluster.kubectl(*run).splitlines() == ["--target tests/hub-model@"]


def test_failed_download_shows_the_words_of_the_hub(make: Make, claim: Callable[[str], dict[str, Any]]) -> None:
    """A gated model: the kubelet's retries are over, and nothing waits for ever without a word."""
    service = make("gated", standin={"prefetch": "refuse"}, **claim("gated"), **TARGET, **SKIP)
    message = service.wait("Progressing", "False", "Stalled")["message"]
    assert "cannot be had from the hub: 401" in message
    assert service.child(JOB, "gated-prefetch")["status"]["failed"] >= 1
    service.wait("Stalled", "True")


def _says(service: Service, words: str) -> bool:
    return words in service.condition("Progressing").get("message", "")
