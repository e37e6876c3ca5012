"""Two teams' releases in one cluster: one where pods must be `restricted`, one where the platform assigns users."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.runtime_config import ADMIN_PORT, SERVING_PORT
from outrider_operator.kinds import SERVICE
from outrider_operator.operator_metrics.status_metrics import CONDITION
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import audit
from tests.cluster.cluster import Cluster
from tests.operator import manifests
from tests.operator.chart.platforms import ASSIGNS_USER, USER, assign_users, client_pod, deny_by_default, reaches
from tests.operator.chart.release import CHART, RELEASE, install, values, write_values
from tests.operator.client import PATIENCE_S, Client, Service, wait_for

pytestmark = pytest.mark.cluster

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
MONITOR = {"matchLabels": {"app": "monitor"}}
HUB = {"name": "tests/model", "source": {"hub": {}}}
"""Restricted pods mount no folder of a node."""


@dataclass(frozen=True)
class Team:
    """A namespace with a service, and the release in another namespace that serves it."""

    name: str
    system: str
    service: Service


def _team(cluster: Cluster, folder: Path, letter: str, labels: dict[str, str], **more: Any) -> Team:
    name, system = f"team-{letter}", f"outrider-{letter}"
    for namespace in (name, system):
        metadata = {"name": namespace, "labels": labels}
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    if labels == ASSIGNS_USER:
        assign_users(cluster, name)
    install(cluster, "install", CHART, write_values(folder, values(watchNamespaces=[name], **more)), system)
    deny_by_default(cluster, name)
    client = Client(str(cluster.kubeconfig))
    client.create(SERVICE, manifests.service("chat", name, target=HUB))
    return Team(name, system, Service(client, name, "chat"))


@pytest.fixture(scope="module")
def restricted(bare: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Team:
    policy = {"enabled": True, "monitoring": [{"namespaceSelector": {}, "podSelector": MONITOR}]}
    return _team(
        bare,
        tmp_path_factory.mktemp("a"),
        "a",
        RESTRICTED,
        servingNetworkPolicy=policy,
        networkPolicy={"enabled": True},
    )


@pytest.fixture(scope="module")
def openshift(bare: Cluster, restricted: Team, tmp_path_factory: pytest.TempPathFactory) -> Team:
    del restricted  # brings the CRD
    folder = tmp_path_factory.mktemp("b")
    return _team(bare, folder, "b", ASSIGNS_USER, crd={"install": False}, platformAssignsUser=True)


def test_services_run_under_the_restricted_pod_security_standard(restricted: Team) -> None:
    """Serving and profiling pods, in a namespace that refuses all others."""
    restricted.service.wait("Ready", "True")
    restricted.service.wait("ProfilesReady", "True")


def test_services_run_under_a_user_that_the_platform_assigns(bare: Cluster, openshift: Team) -> None:
    """A user that no image knows, in the root group: home and caches are writable, and profiling works too."""
    openshift.service.wait("Ready", "True")
    openshift.service.wait("ProfilesReady", "True")
    (pod,) = openshift.service.pods()
    script = (
        'id -u; for each in "$HOME" "$HF_HOME" "$XDG_CACHE_HOME" /tmp /dev/shm; do touch "$each/new" || exit 1; done'
    )
    output = bare.kubectl("exec", pod["metadata"]["name"], "-n", openshift.name, "--", "sh", "-c", script)
    assert output.split() == [str(USER)]


def test_the_admin_port_is_for_the_operator_and_for_monitoring(bare: Cluster, restricted: Team) -> None:
    """A service in a namespace that denies by default serves all clients, and shows its state to few."""
    restricted.service.wait_updated()
    (pod,) = restricted.service.pods()
    address, name = pod["status"]["podIP"], restricted.name
    for client in ("monitor", "stranger"):
        bare.apply(client_pod(client, name))
        bare.wait_until(client, partial(reaches, bare, client, name, address, SERVING_PORT), PATIENCE_S)
    # The policy knows it once its address is in its status, which may be a moment after its first connection.
    bare.wait_until("monitoring", partial(reaches, bare, "monitor", name, address, ADMIN_PORT), PATIENCE_S)
    assert not reaches(bare, "stranger", name, address, ADMIN_PORT)


def test_conditions_name_the_policy_that_blocks_the_operator(bare: Cluster, openshift: Team) -> None:
    """Pods are ready, since the kubelet reaches them; a condition should tell why nothing is known of them."""
    for kind, status, reason in (
        ("Updated", "False", "ConfigPending"),
        ("GoodputHealthy", "Unknown", "MetricsUnavailable"),
    ):
        # The reason may be there before the first connection to the pod has failed.
        said = openshift.service.wait(kind, status, reason, "NetworkPolicy default-deny selects it")["message"]
        assert "servingNetworkPolicy.enabled" in said
    bare.kubectl("delete", "networkpolicy", "default-deny", "-n", openshift.name)
    openshift.service.wait_updated()


def test_prometheus_sees_conditions_of_the_releases_services(bare: Cluster, openshift: Team) -> None:
    """The alerts stand on these series; one that stayed after its service would fire for ever."""
    client = openshift.service.client
    client.create(SERVICE, manifests.service("brief", openshift.name, target=HUB, replicas=0))
    brief = Service(client, openshift.name, "brief")
    brief.wait("Ready", "False", "ScaledToZero")
    wait_for("its series", lambda: ("brief", "Ready", "False", "ScaledToZero") in _series(bare, openshift))
    client.delete(SERVICE, openshift.name, "brief")
    wait_for("its series to go", lambda: {name for name, *_ in _series(bare, openshift)} == {"chat"})


def test_two_releases_of_one_name_stand_side_by_side(bare: Cluster, restricted: Team, openshift: Team) -> None:
    """Each has a priority class of its own, serves its own namespace, and goes without taking the other's."""
    teams = (restricted, openshift)
    expected = {f"{team.system}.{RELEASE}-profiling-minus-5": -5 for team in teams}
    present = {
        priority_class["metadata"]["name"]: priority_class["value"] for priority_class in bare.get("priorityclasses")
    }
    assert expected.items() <= present.items()
    bare.helm("uninstall", RELEASE, "-n", restricted.system, "--wait")
    openshift.service.patch({"profiling": {"mode": "Auto", "timeout": "20m"}, "replicas": 2})
    openshift.service.wait("Available", "True")
    wait_for("both pods", lambda: len(openshift.service.ready_pods()) == 2)
    writers = _writers(bare, openshift.name)
    assert writers == {f"system:serviceaccount:{openshift.system}:{RELEASE}"}


def _series(cluster: Cluster, team: Team) -> set[tuple[str, ...]]:
    """(service, type, status, reason) of each condition that the team's operator exports."""
    (pod,) = cluster.get("pods", namespace=team.system)
    path = f"/api/v1/namespaces/{team.system}/pods/{pod['metadata']['name']}:8081/proxy/metrics"
    families = text_string_to_metric_families(cluster.kubectl("get", "--raw", path))
    samples = [sample for family in families if family.name == CONDITION for sample in family.samples]
    assert {sample.labels["outrider_namespace"] for sample in samples} <= {team.name}
    expected = ("outrider_service", "type", "status", "reason")
    return {tuple(sample.labels[label] for label in expected) for sample in samples}


def _writers(cluster: Cluster, namespace: str) -> set[str]:
    """Service accounts of operators that wrote in the namespace."""
    writes = audit.writes(cluster.layout.audit)
    names = {w["user"]["username"] for w in writes if w.get("objectRef", {}).get("namespace") == namespace}
    return {name for name in names if ":outrider-" in name}
