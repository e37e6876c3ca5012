"""`vllm serve` in a Deployment that a team has: the operator tunes its pods, owns one ConfigMap, and restarts nothing.

The tests share the pods and run in the order they stand in.
"""

from __future__ import annotations

import copy
from collections.abc import Generator

import pytest
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, POD, SERVICE

from tests.cluster.cluster import Cluster
from tests.e2e.conftest import PATIENCE_S
from tests.e2e.stock_pods import EXAMPLE, StockPods, kustomized, service_for
from tests.operator.client import uids, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(2 * PATIENCE_S)]

LABELS = {"app": "llama"}


@pytest.fixture(scope="module")
def pods(installed: Cluster) -> Generator[StockPods]:
    documents = kustomized(installed, EXAMPLE)
    service = service_for(documents["SpeculativeService"], "llama", LABELS)
    yield StockPods(installed, service, [documents["Deployment"]])
    installed.kubectl("delete", "deployment", "llama", "--wait")


def test_spec_is_in_force_in_pods_that_a_team_made(pods: StockPods) -> None:
    message = pods.service.wait("Updated", "True", "UpToDate")["message"]
    assert message == "The spec is in force in all 1 ready pods."
    pods.service.wait("Ready", "True", "EndpointReady")
    drafts = {draft["name"]: draft["loaded"] for draft in pods.service.read()["status"]["drafts"]}
    assert drafts == {"lookup": True, "eagle": True}
    kinds = (CONFIG_MAP, DEPLOYMENT, POD)
    owned = {kind.kind: [child["metadata"]["name"] for child in pods.service.children(kind)] for kind in kinds}
    assert owned == {"ConfigMap": ["llama-config"], "Deployment": [], "Pod": []}
    assert "outrider.dev" not in str(pods.deployment()["metadata"].get("annotations"))


def test_figures_of_the_pods_requests_are_in_the_status(pods: StockPods) -> None:
    def has_figures() -> bool:
        assert pods.ask().status_code == 200
        status = pods.service.read()["status"]
        return float(status.get("goodput", {}).get("tokensPerSecond") or 0) > 0

    wait_for("figures", has_figures, timeout_s=PATIENCE_S)


def test_hot_change_reaches_the_pods_without_a_restart(pods: StockPods) -> None:
    before = uids(pods.all()), pods.restarts(), pods.deployment()["metadata"]["generation"]
    pods.service.patch({"speculation": {"mode": "Off"}})
    pods.service.wait_updated()
    assert pods.ask().status_code == 200
    wait_for("mode Off", lambda: pods.ask("/outrider/state").json()["choice"]["reason"] == "Off")
    pods.service.patch({"speculation": {"mode": "ClosedLoop"}})
    pods.service.wait_updated()
    assert (uids(pods.all()), pods.restarts(), pods.deployment()["metadata"]["generation"]) == before


def test_change_of_drafters_names_the_pods_to_restart(pods: StockPods) -> None:
    (pod,) = (pod["metadata"]["name"] for pod in pods.all())
    before = pods.service_document["spec"]["draftPool"]
    after = copy.deepcopy(before)
    after[0]["promptLookup"] = {"minTokens": 3}
    pods.service.patch({"draftPool": after})
    message = pods.service.wait("Updated", "False", "RestartNeeded")["message"]
    assert f"restart {pod} (the drafters of draftPool are not those of the start)" in message
    pods.service.wait("Stalled", "True", "RestartNeeded")
    pods.service.patch({"draftPool": before})
    pods.service.wait_updated()
    assert [it["metadata"]["name"] for it in pods.all()] == [pod]


def test_deleted_service_leaves_the_teams_deployment_alone(pods: StockPods) -> None:
    before = uids(pods.all()), pods.restarts(), pods.deployment()["spec"]
    pods.client.delete(SERVICE, "default", "llama")
    wait_for("the file's end", lambda: pods.client.get(CONFIG_MAP, "default", "llama-config") is None)
    assert (uids(pods.all()), pods.restarts(), pods.deployment()["spec"]) == before
    assert pods.ask().status_code == 200
