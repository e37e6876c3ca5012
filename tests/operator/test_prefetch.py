"""`modelCache.pvc` on a real cluster: one Job fills the claim, and pods wait for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from outrider_operator.kinds import DEPLOYMENT

from tests.cluster.cluster import Cluster
from tests.operator.claims import HUB_TARGET, Claim
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster

SKIP = {"profiling": {"mode": "Skip"}}


def test_pods_wait_for_one_download_that_reports_progress(
    make: Make, cluster: Cluster, client: Client, namespace: str, tmp_path: Path
) -> None:
    """Three pods, one download; the figures come from the Job's own pod."""
    claim = Claim(cluster, namespace, tmp_path / "volume", "weights")
    service = make("filling", standin={"prefetch": "wait"}, replicas=3, **claim.field, **HUB_TARGET, **SKIP)
    service.wait("Progressing", "True", "WaitingForModels")
    wait_for("progress", partial(_says, service, "3Gi of 12Gi (25%)"))
    assert service.read()["status"]["prefetch"]["phase"] == "Downloading"
    assert client.get(DEPLOYMENT, service.namespace, service.name) is None
    (claim.folder / "go").touch()
    service.wait("Updated", "True")
    assert service.read()["status"]["prefetch"]["phase"] == "Complete"
    assert (claim.folder / "downloads").read_text().splitlines() == ["--target tests/hub-model@"]


def _says(service: Service, words: str) -> bool:
    return words in service.condition("Progressing").get("message", "")
