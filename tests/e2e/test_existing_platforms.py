"""Pods of other platforms, as their charts render them: the operator tunes them as it does those of a Deployment."""

from __future__ import annotations

import pytest
import yaml

from setup.steps import REPOSITORY
from tests.cluster.cluster import Cluster
from tests.e2e.conftest import PATIENCE_S
from tests.e2e.stock_pods import EXAMPLE, StockPods, kustomized, service_for

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(2 * PATIENCE_S)]

RENDERED = REPOSITORY / "tests" / "e2e" / "platform_objects"


@pytest.mark.parametrize(
    ("platform", "labels"),
    [("production-stack", {"model": "llama"}), ("llm-d", {"llm-d.ai/model": "llama", "llm-d.ai/role": "decode"})],
)
def test_pods_of_a_platform_are_tuned(installed: Cluster, platform: str, labels: dict[str, str]) -> None:
    """Its own rendered objects with Outrider's lines: the spec is in force, drafters are loaded, pods answer."""
    documents = list(yaml.safe_load_all((RENDERED / f"{platform}-with-outrider.yaml").read_text()))
    service = service_for(kustomized(installed, EXAMPLE)["SpeculativeService"], "llama", labels)
    pods = StockPods(installed, service, documents)
    pods.service.wait("Updated", "True", "UpToDate")
    assert all(draft["loaded"] for draft in pods.service.read()["status"]["drafts"])
    assert pods.ask().status_code == 200
    assert "outrider_active" in pods.ask("/metrics").text
    pods.end()
