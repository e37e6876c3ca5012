"""Pods that a team's Deployment made, on a cluster: what the operator writes for them, says of them, and leaves alone.

They answer on the port, but not with a state. tests/e2e/test_existing_workloads.py has real vLLM in them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, POD, SERVICE

from tests.operator import manifests
from tests.operator.client import Client, Service, uids, wait_for
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster


def _deployment(namespace: str) -> dict[str, Any]:
    labels = {"app": "web", "tier": "front"}
    container = {
        "name": "web",
        "image": manifests.IMAGE,
        "command": ["python", "-m", "http.server", "8000", "-d", "/srv"],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
    }
    pod = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


class Team:
    """A namespace with a Deployment, and services that select its pods."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        client.create(DEPLOYMENT, _deployment(namespace))

    def select(self, name: str, **labels: str) -> Service:
        document = manifests.service(name, self.namespace)
        del document["spec"]["engine"], document["spec"]["rollout"]
        document["spec"]["workload"] = {"existing": {"podSelector": {"matchLabels": labels}}}
        self.client.create(SERVICE, document)
        return Service(self.client, self.namespace, name)

    def end(self, service: Service) -> None:
        self.client.delete(SERVICE, self.namespace, service.name)
        wait_for("its file to go", lambda: self.file(service) is None)

    def file(self, service: Service) -> dict[str, Any] | None:
        return self.client.get(CONFIG_MAP, self.namespace, f"{service.name}-config")

    def pods(self) -> list[dict[str, Any]]:
        return self.client.list(POD, self.namespace, "app=web")

    def spec(self) -> Any:
        return (self.client.get(DEPLOYMENT, self.namespace, "web") or {})["spec"]


@pytest.fixture(scope="module")
def team(client: Client, namespace: str, operator_process: OperatorProcess) -> Team:
    del operator_process
    return Team(client, namespace)


def test_pods_without_the_plugin_are_named(team: Team) -> None:
    service = team.select("web", app="web")

    def all_are_named() -> bool:
        message = service.condition("Updated").get("message", "")
        named = [f"{pod['metadata']['name']} (HTTP status 404)" in message for pod in team.pods()]
        return len(named) == 2 and all(named)

    wait_for("the names of both pods", all_are_named)
    service.wait("Updated", "False", "NotActive")
    service.wait("Ready", "True", "EndpointReady")
    service.wait("Stalled", "True", "NotActive")
    status = service.read()["status"]
    assert (status["replicas"], status["readyReplicas"], status["selector"]) == (2, 2, "app=web")


def test_operator_owns_one_config_map_and_no_pod(team: Team) -> None:
    service = Service(team.client, team.namespace, "web")
    document = team.file(service)
    assert document is not None
    file = json.loads(document["data"]["outrider.yaml"])
    assert [drafter["name"] for drafter in file["draftPool"]] == ["lookup"]
    service.patch({"speculation": {"mode": "Off"}})
    wait_for("the edit", lambda: '"Off"' in str((team.file(service) or {}).get("data")))
    assert [child["metadata"]["name"] for child in service.children(CONFIG_MAP)] == ["web-config"]
    assert service.children(DEPLOYMENT) == service.children(POD) == []
    assert all("outrider" not in str(pod["metadata"].get("annotations")) for pod in team.pods())


def test_pods_of_two_services_are_conditions_of_both(team: Team) -> None:
    first, second = Service(team.client, team.namespace, "web"), team.select("front", tier="front")
    assert "(web)" in second.wait("Updated", "False", "PodShared")["message"]
    assert "(front)" in first.wait("Updated", "False", "PodShared")["message"]
    team.end(second)
    first.wait("Updated", "False", "NotActive")


def test_conditions_follow_the_pods_and_the_selector(team: Team) -> None:
    service = Service(team.client, team.namespace, "web")
    service.patch({"workload": {"existing": {"podSelector": {"matchLabels": {"app": "nothing"}}}}})
    assert "app=nothing" in service.wait("Updated", "False", "NoPodSelected")["message"]
    service.patch({"workload": {"existing": {"podSelector": {"matchLabels": {"app": "web"}}}}})
    service.wait("Available", "True", "EnoughReadyPods")
    team.client.patch(DEPLOYMENT, team.namespace, "web", {"spec": {"replicas": 1}})
    wait_for("one pod", lambda: service.read()["status"]["replicas"] == 1)


def test_new_operator_reports_the_same(team: Team, operator_process: OperatorProcess) -> None:
    service = Service(team.client, team.namespace, "web")
    before = service.wait("Updated", "False", "NotActive")
    with operator_process.restarted():
        service.patch({"speculation": {"mode": "ClosedLoop"}})
        wait_for("the edit", lambda: '"ClosedLoop"' in str((team.file(service) or {}).get("data")))
        assert service.wait("Updated", "False", "NotActive")["lastTransitionTime"] == before["lastTransitionTime"]


def test_deleted_service_leaves_deployment_and_pods_alone(team: Team) -> None:
    before = uids(team.pods()), team.spec()
    team.end(Service(team.client, team.namespace, "web"))
    assert (uids(team.pods()), team.spec()) == before
