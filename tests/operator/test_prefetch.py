"""`modelCache.pvc` on a real cluster: one Job fills the claim, and pods wait for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outrider_operator.kinds import DEPLOYMENT, JOB

from tests.cluster.cluster import Cluster
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster

SKIP = {"profiling": {"mode": "Skip"}}
TARGET = {"target": {"name": "tests/hub-model"}}


class Claim:
    """A claim whose volume is a folder of this machine, which every node sees."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, name: str) -> None:
        self.folder = folder
        self.field: dict[str, Any] = {"modelCache": {"pvc": {"claimName": name}}}
        volume, common = f"{namespace}-{name}", {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        spec = {**common, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder), "type": "Directory"}}
        cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
        claim = {**common, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
        metadata, kind = {"name": name, "namespace": namespace}, "PersistentVolumeClaim"
        cluster.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": claim})


@pytest.fixture
def claim(cluster: Cluster, namespace: str, tmp_path: Path, request: pytest.FixtureRequest) -> Claim:
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)  # Kubernetes changes no owner in a folder of the node
    return Claim(cluster, namespace, folder, request.node.name.replace("_", "-")[-40:].strip("-"))


def test_pods_wait_for_one_download_that_reports_progress(make: Make, claim: Claim, client: Client) -> None:
    """Three pods, one download; the figures come from the Job's own pod."""
    service = make("filling", standin={"prefetch": "wait"}, replicas=3, **claim.field, **TARGET, **SKIP)
    service.wait("Progressing", "True", "WaitingForModels")
    wait_for("progress", partial(_says, service, "3Gi of 12Gi (25%)"))
    assert service.read()["status"]["prefetch"]["phase"] == "Downloading"
    assert client.get(DEPLOYMENT, service.namespace, service.name) is None
    (claim.folder / "go").touch()
    service.wait("Updated", "True")
    assert service.read()["status"]["prefetch"]["phase"] == "Complete"
    assert (claim.folder / "downloads").read_text().splitlines() == ["--target tests/hub-model@"]


def test_failed_download_shows_the_words_of_the_hub(make: Make, claim: Claim) -> None:
    """A gated model: the kubelet's retries are over, and nothing waits for ever without a word."""
    service = make("gated", standin={"prefetch": "refuse"}, **claim.field, **TARGET, **SKIP)
    message = service.wait("Progressing", "False", "Stalled")["message"]
    assert "cannot be had from the hub: 401" in message
    assert service.child(JOB, "gated-prefetch")["status"]["failed"] >= 1
    service.wait("Stalled", "True")


def _says(service: Service, words: str) -> bool:
    return words in service.condition("Progressing").get("message", "")
