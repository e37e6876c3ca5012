"""The chart's life on a real cluster: the previous release, the upgrade, the uninstall, and Roles alone.

One story, in order: each fixture goes on from where the one before it ended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.generate import CRD_NAME
from outrider_operator.kinds import DEPLOYMENT, LEASE, POD, SERVICE

from tests.cluster.cluster import Cluster
from tests.images.builder import builder
from tests.operator import manifests
from tests.operator.chart.release import (
    CHART,
    PREVIOUS_RUNTIME,
    RELEASE,
    SYSTEM,
    install,
    previous_chart,
    values,
    write_values,
)
from tests.operator.client import PATIENCE_S, Client, Service, wait_for

pytestmark = pytest.mark.cluster

TEAM = "team-a"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:{RELEASE}"


@pytest.fixture(scope="module")
def client(bare: Cluster) -> Client:
    for namespace in (SYSTEM, TEAM, "team-b"):
        bare.kubectl("create", "namespace", namespace)
    # The operator's pod must pass the strictest of Kubernetes' pod security standards.
    bare.kubectl("label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce=restricted")
    return Client(str(bare.kubeconfig))


@pytest.fixture(scope="module")
def previous(bare: Cluster, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """The previous release of the chart, and a service that it brought up."""
    folder = tmp_path_factory.mktemp("previous")
    chart = previous_chart(folder)
    file = write_values(folder, values(PREVIOUS_RUNTIME))
    install(bare, "install", chart, file)
    client.create(SERVICE, manifests.service("chat", TEAM))
    service = Service(client, TEAM, "chat")
    wait_for("the service to be Ready", lambda: service.condition("Ready").get("status") == "True")
    return service


@pytest.fixture(scope="module")
def upgraded(bare: Cluster, previous: Service, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The upgrade to this chart; gives the serving pod as it was before."""
    before = _serving_pod(previous)
    folder = tmp_path_factory.mktemp("present")
    install(bare, "upgrade", CHART, write_values(folder, values()))
    newest = _operator_pod(previous.client)
    wait_for("the new operator to take the Lease", lambda: _holder(previous.client) == newest)
    return before


def test_the_previous_release_serves(previous: Service) -> None:
    """The operator works under its own service account: children, profile, annotation, status, and events."""
    wait_for("the profile", lambda: previous.condition("ProfilesReady").get("status") == "True")
    assert previous.read()["status"]["runtimeImage"] == PREVIOUS_RUNTIME


def test_an_upgrade_restarts_no_serving_pod(upgraded: dict[str, Any], previous: Service) -> None:
    """The new operator's default image is another one; the pod, its container and its revision stay as they were."""
    previous.patch({"sloClasses": [{"name": "chat", "tpot": "60ms"}]})  # proves that the new operator reconciles
    generation = previous.read()["metadata"]["generation"]
    wait_for(
        "the new operator to bring the new config to the pod",
        lambda: _is_true(previous.condition("Updated"), generation),
    )
    pod = _serving_pod(previous)
    assert pod["metadata"]["uid"] == upgraded["metadata"]["uid"]
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert previous.read()["status"]["runtimeImage"] == PREVIOUS_RUNTIME


def test_an_upgrade_brings_the_new_crd(upgraded: dict[str, Any], previous: Service) -> None:
    """A field that the previous CRD did not have is kept, not pruned."""
    del upgraded
    assert previous.patch({"paused": True})["spec"]["paused"] is True
    assert previous.patch({"paused": False})["spec"]["paused"] is False


def test_the_operators_own_image_takes_over(
    bare: Cluster, upgraded: dict[str, Any], previous: Service, tmp_path: Path
) -> None:
    """The Dockerfile's image on a node whose containers see nothing of this machine: it leads, and brings a change to
    a pod, without a restart of that. Other tests mount the checkout, and so miss what an image lacks."""
    if os.environ.get("OUTRIDER_BUILD_IMAGES") not in ("all", "operator"):
        pytest.skip("OUTRIDER_BUILD_IMAGES=operator, or =all, builds the image")
    program = builder()
    image = program.build("operator")
    program.save(image, tmp_path / "operator.tar")
    node = bare.add_node(own_images=True)
    bare.load_image(node, tmp_path / "operator.tar")
    repository, tag = image.rsplit(":", 1)
    own = {"image": {"repository": repository, "tag": tag}, "nodeSelector": {"kubernetes.io/hostname": node}}
    install(bare, "upgrade", CHART, write_values(tmp_path, {**values(), "operator": own}))
    bare.kubectl("cordon", node)  # the stand-in is not there
    newest = _operator_pod(previous.client)
    wait_for("the image's operator to take the Lease", lambda: _holder(previous.client) == newest)
    previous.patch({"sloClasses": [{"name": "chat", "tpot": "70ms"}]})
    generation = previous.read()["metadata"]["generation"]
    wait_for("the change in the pod", lambda: _is_true(previous.condition("Updated"), generation))
    assert _serving_pod(previous)["metadata"]["uid"] == upgraded["metadata"]["uid"]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("list speculativeservices.outrider.dev -A", "yes"),
        ("update speculativeservices.outrider.dev --subresource=status -A", "yes"),
        ("patch deployments.apps -A", "yes"),
        ("watch nodes", "yes"),
        ("delete networkpolicies.networking.k8s.io -A", "yes"),
        ("create leases.coordination.k8s.io -n outrider-system", "yes"),
        ("update leases.coordination.k8s.io/outrider -n outrider-system", "yes"),
        ("update leases.coordination.k8s.io/other -n outrider-system", "no"),
        ("update leases.coordination.k8s.io/outrider -n team-a", "no"),
        ("get secrets -n team-a", "no"),
        ("list secrets -A", "no"),
        ("create secrets -n outrider-system", "no"),
        ("patch speculativeservices.outrider.dev -A", "no"),
        ("delete deployments.apps -A", "yes"),
        ("delete services -A", "no"),
        ("delete pods -A", "no"),
        ("create pods -A", "no"),
        ("get pods --subresource=log -A", "no"),
        ("create pods --subresource=exec -A", "no"),
        ("patch pods -n team-a", "yes"),
        ("create events -n team-a", "yes"),
        ("patch events -A", "no"),
        ("create events.events.k8s.io -A", "no"),
        ("patch nodes", "no"),
        ("get namespaces", "no"),
        ("list customresourcedefinitions.apiextensions.k8s.io", "no"),
        ("create clusterrolebindings.rbac.authorization.k8s.io", "no"),
        ("create serviceaccounts --subresource=token -n team-a", "no"),
    ],
)
def test_the_operator_may_do_its_work_and_no_more(
    bare: Cluster, upgraded: dict[str, Any], question: str, answer: str
) -> None:
    """The real authorizer's answers for the real service account."""
    del upgraded
    done = bare.try_kubectl("auth", "can-i", f"--as={ACCOUNT}", *question.split())
    assert done.stdout.strip() == answer, done.stderr


@pytest.mark.parametrize(("verb", "allowed"), [("delete", "true"), ("list", "false")])
def test_the_operator_has_rights_on_pools_without_their_crd(
    bare: Cluster, upgraded: dict[str, Any], verb: str, allowed: str
) -> None:
    """`kubectl auth can-i` says no to every verb on a kind that the API server does not have, so this asks directly."""
    del upgraded
    resource = {"group": "inference.networking.k8s.io", "resource": "inferencepools", "verb": verb}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": ACCOUNT, "resourceAttributes": resource},
    }
    assert bare.kubectl("create", "-f", "-", "-o", "jsonpath={.status.allowed}", stdin=json.dumps(review)) == allowed


@pytest.mark.parametrize(
    ("role", "question", "answer"),
    [
        ("view", "get speculativeservices", "yes"),
        ("view", "patch speculativeservices", "no"),
        ("edit", "create speculativeservices", "yes"),
        ("edit", "patch speculativeservices --subresource=scale", "yes"),
        ("edit", "update speculativeservices --subresource=status", "no"),
        ("admin", "delete speculativeservices", "yes"),
    ],
)
def test_users_get_their_rights_from_the_clusters_own_roles(
    bare: Cluster, upgraded: dict[str, Any], role: str, question: str, answer: str
) -> None:
    """Someone with edit on a namespace can run services in it: the roles aggregate."""
    del upgraded
    binding = f"{role}-of-team-a"
    if not bare.exists("rolebinding", binding, namespace=TEAM):
        bare.kubectl("create", "rolebinding", binding, f"--clusterrole={role}", f"--user={role}-user", "-n", TEAM)

    def answered() -> bool:
        done = bare.try_kubectl("auth", "can-i", f"--as={role}-user", "-n", TEAM, *question.split())
        return done.stdout.strip() == answer

    bare.wait_until(f"{role} can {question}: {answer}", answered, PATIENCE_S)


def test_an_uninstall_leaves_the_service_and_its_pods(
    bare: Cluster, upgraded: dict[str, Any], previous: Service
) -> None:
    """`helm uninstall` stops the operator; the CRD, the service and the serving pod are as they were."""
    bare.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")
    assert previous.client.get(DEPLOYMENT, SYSTEM, RELEASE) is None
    assert bare.exists("crd", CRD_NAME)
    assert previous.read()["metadata"].get("deletionTimestamp") is None
    assert _serving_pod(previous)["metadata"]["uid"] == upgraded["metadata"]["uid"]


def test_roles_alone_are_enough(bare: Cluster, upgraded: dict[str, Any], previous: Service, tmp_path: Path) -> None:
    """The operator serves only watchNamespaces, without a ClusterRole.

    The release takes over the service that the uninstalled one left, without a restart of its pod.
    """
    scoped = values(
        rbac={"clusterScoped": False},
        watchNamespaces=[TEAM],
        crd={"install": False},
        profiling={"priorityClass": {"create": False}},
    )
    install(bare, "install", CHART, write_values(tmp_path, scoped))
    client = previous.client
    client.create(SERVICE, manifests.service("second", TEAM))
    client.create(SERVICE, manifests.service("foreign", "team-b"))
    second = Service(client, TEAM, "second")
    wait_for("the service in the watched namespace", lambda: second.condition("Ready").get("status") == "True")
    wait_for("its profile", lambda: second.condition("ProfilesReady").get("status") == "True")
    assert Service(client, "team-b", "foreign").read()["status"]["observedGeneration"] == -1
    assert _serving_pod(previous)["metadata"]["uid"] == upgraded["metadata"]["uid"]
    assert bare.try_kubectl("auth", "can-i", f"--as={ACCOUNT}", "list", "nodes").stdout.strip() == "no"
    assert bare.try_kubectl("auth", "can-i", f"--as={ACCOUNT}", "list", "pods", "-n", "team-b").stdout.strip() == "no"


def _serving_pod(service: Service) -> dict[str, Any]:
    selector = f"outrider.dev/service={service.name},outrider.dev/component=serving"
    (pod,) = service.client.list(POD, service.namespace, selector)
    return pod


def _holder(client: Client) -> str:
    lease = client.get(LEASE, SYSTEM, RELEASE)
    assert lease is not None, "the operator has made no Lease"
    return str(lease["spec"]["holderIdentity"])


def _operator_pod(client: Client) -> str:
    """Name of the operator's pod that is not on its way out."""
    pods = client.list(POD, SYSTEM, f"app.kubernetes.io/instance={RELEASE}")
    (present,) = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return str(present["metadata"]["name"])


def _is_true(condition: dict[str, Any], generation: int) -> bool:
    return condition.get("status") == "True" and condition.get("observedGeneration") == generation
