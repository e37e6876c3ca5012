"""Whatever dies, and whenever: it ends in the same place, with no second Job and no deleted pod."""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outrider_operator.controller.supervision import RUNNING
from outrider_operator.decide.desired.desired_state import UPGRADE_ANNOTATION, upgrade_rank
from outrider_operator.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB,
    KUBERNETES_SERVICE,
    LEASE,
    POD,
    REPLICA_SET,
    SERVICE,
    SERVICE_ACCOUNT,
    ResourceKind,
)

from tests.cluster import audit
from tests.cluster.cluster import Cluster
from tests.operator.client import Client, Service, uids, wait_for
from tests.operator.conftest import WINDOW, Make
from tests.operator.process import NAMESPACE, OperatorProcess

pytestmark = pytest.mark.cluster

RECONCILES = "outrider_operator_reconciles_total"
LOOKS = 18
"""Changes, one per second: more than fit between two writes of figures."""
CHILDREN = (SERVICE_ACCOUNT, CONFIG_MAP, KUBERNETES_SERVICE, DISRUPTION_BUDGET, DEPLOYMENT, REPLICA_SET, POD, JOB)


@pytest.fixture(scope="module")
def steady(make: Make) -> Service:
    """The API server writes its request in another way: 100m."""
    service = make("steady", replicas=2, podTemplate={"resources": {"requests": {"cpu": "0.1"}}})
    service.wait_updated()
    service.wait("ProfilesReady", "True")
    return service


def test_kopf_leaves_no_trace(steady: Service) -> None:
    """No annotation, finalizer or status of the framework's: a service is deletable while the operator is down."""
    document = steady.read()
    assert "finalizers" not in document["metadata"]
    assert "annotations" not in document["metadata"]
    assert "kopf" not in json.dumps(document)
    for kind in CHILDREN:
        assert "kopf" not in json.dumps(steady.children(kind))


def test_the_health_names_each_background_task(steady: Service, operator_process: OperatorProcess) -> None:
    """The health page tells which task ended, and why, for an alert on restarts."""
    del steady
    expected = {"resync", "polls of the pods", "histories", "watch of pods in all namespaces", "worker 1"}
    # kopf answers a probe from what it knew some seconds ago.
    tasks = wait_for("the tasks", lambda: expected <= set(running := operator_process.health()["tasks"]) and running)
    assert set(tasks.values()) == {RUNNING}


def test_an_idle_operator_does_not_write(steady: Service, operator_process: OperatorProcess, cluster: Cluster) -> None:
    """A settled service costs no API write, Lease renewals aside, resyncs included."""

    def is_quiet() -> bool:
        before = _writes(cluster, steady.namespace)
        enough = operator_process.metric(RECONCILES) + LOOKS
        wait_for("some looks", lambda: operator_process.metric(RECONCILES) >= enough)
        return _writes(cluster, steady.namespace) == before

    with operator_process.restarted(OUTRIDER_RESYNC_INTERVAL="1s"):
        wait_for("looks without a write: a pod that answers late on a busy machine is news", is_quiet)


@pytest.mark.parametrize(
    "kind", [SERVICE_ACCOUNT, KUBERNETES_SERVICE, DISRUPTION_BUDGET, DEPLOYMENT], ids=lambda k: k.kind
)
def test_a_deleted_child_comes_back(steady: Service, client: Client, kind: ResourceKind) -> None:
    """A child deleted by hand is created again at once. (Pods are kept, as with --cascade=orphan.)"""
    before = steady.child(kind)["metadata"]["uid"]
    client.delete(kind, steady.namespace, steady.name, policy="Orphan")
    wait_for(f"the {kind.kind}", lambda: _other(client.get(kind, steady.namespace, steady.name), before))


@pytest.mark.parametrize("suffix", ["hot", "revision"])
def test_a_deleted_config_comes_back(steady: Service, client: Client, suffix: str) -> None:
    """The pods' configuration, too: a new pod could not start without it."""
    name = f"steady-{steady.revision if suffix == 'revision' else suffix}"
    before, pods = steady.child(CONFIG_MAP, name), uids(steady.pods())
    client.delete(CONFIG_MAP, steady.namespace, name)
    made = wait_for(name, lambda: _other(client.get(CONFIG_MAP, steady.namespace, name), before["metadata"]["uid"]))
    assert made["data"]["config.json"] == before["data"]["config.json"]
    assert uids(steady.pods()) == pods


def test_changes_by_hand_are_taken_back(steady: Service, client: Client) -> None:
    """Fields that Outrider sets come back; fields that others add stay."""
    before = uids(steady.pods())
    client.patch(DEPLOYMENT, steady.namespace, "steady", {"spec": {"replicas": 5, "progressDeadlineSeconds": 7}})
    client.patch(CONFIG_MAP, steady.namespace, "steady-hot", {"data": {"config.json": "{}"}})
    client.patch(KUBERNETES_SERVICE, steady.namespace, "steady", {"spec": {"selector": {"outrider.dev/service": "x"}}})
    ours = {"metadata": {"labels": {"team": "search", "outrider.dev/service": "other"}}}
    client.patch(DISRUPTION_BUDGET, steady.namespace, "steady", ours)

    def restored() -> bool:
        deployment, hot = steady.child(DEPLOYMENT)["spec"], steady.child(CONFIG_MAP, "steady-hot")["data"]
        selector = steady.child(KUBERNETES_SERVICE)["spec"]["selector"]
        labels = steady.child(DISRUPTION_BUDGET)["metadata"]["labels"]
        return (
            (deployment["replicas"], deployment["progressDeadlineSeconds"]) == (2, 300)
            and "mode" in hot["config.json"]
            and selector["outrider.dev/service"] == "steady"
            and labels["outrider.dev/service"] == "steady"
            and labels["team"] == "search"
        )

    wait_for("what Outrider sets", restored)
    wait_for("two pods", lambda: len(steady.ready_pods()) == len(steady.pods()) == 2)
    assert uids(steady.pods()) & before


def test_an_object_of_another_controller_is_left_alone(
    make: Make, client: Client, namespace: str, operator_process: OperatorProcess
) -> None:
    """NameConflict names the object; nothing of it changes, and the service comes up once it is gone. It has no label
    that is watched, so a regular look finds that."""
    owner = client.create(CONFIG_MAP, {"metadata": {"name": "their-owner", "namespace": namespace}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "their-owner", "controller": True}
    metadata = {
        "name": "taken",
        "namespace": namespace,
        "ownerReferences": [{**reference, "uid": owner["metadata"]["uid"]}],
    }
    spec = {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}
    theirs = client.create(KUBERNETES_SERVICE, {"metadata": metadata, "spec": spec})
    with operator_process.restarted(OUTRIDER_RESYNC_INTERVAL="1s"):
        service = make("taken", profiling={"mode": "Skip"})
        valid = service.wait("SpecValid", "False", "NameConflict")
        assert "Service taken belongs to ConfigMap their-owner" in valid["message"]
        kept = client.get(KUBERNETES_SERVICE, namespace, "taken")
        assert kept is not None
        assert kept["metadata"]["resourceVersion"] == theirs["metadata"]["resourceVersion"]
        assert client.get(DEPLOYMENT, namespace, "taken") is None
        client.delete(KUBERNETES_SERVICE, namespace, "taken")
        service.wait("SpecValid", "True")
        service.wait_updated()


def test_a_service_takes_back_what_one_before_it_left(make: Make, client: Client) -> None:
    """kubectl delete --cascade=orphan, then the manifest again: the pods serve through it, and it is whole again."""
    service = make("orphans", profiling={"mode": "Skip"})
    service.wait_updated()
    before = uids(service.pods())
    client.delete(SERVICE, service.namespace, service.name, policy="Orphan")
    wait_for("the service to go", lambda: client.get(SERVICE, service.namespace, service.name) is None)
    make("orphans", profiling={"mode": "Skip"}).wait_updated()
    assert uids(service.pods()) == before
    service.patch({"engine": {"maxModelLen": 512}})
    service.wait_updated()


def test_killed_in_the_middle_of_everything(make: Make, operator_process: OperatorProcess, cluster: Cluster) -> None:
    """SIGKILL again and again while a service comes up and rolls out: one Job, and no pod deleted twice."""
    service = make("shaken", replicas=2, standin={"profile_s": 3})
    for pause in (0.3, 0.6, 1.2, 2.0):
        time.sleep(pause)
        operator_process.kill()
        operator_process.start()
    service.wait_updated()
    service.wait("ProfilesReady", "True")
    name = service.read()["status"]["profiles"][0]["configMap"]
    assert audit.created(cluster.layout.audit, "jobs", service.namespace).count(name) == 1
    service.patch({"engine": {"maxModelLen": 512}})
    for pause in (0.2, 0.8):
        time.sleep(pause)
        operator_process.kill()
        operator_process.start()
    service.wait_updated()
    made = audit.created(cluster.layout.audit, "replicasets", service.namespace)
    assert len([name for name in made if name.startswith("shaken-")]) == 2


def test_an_upgrade_restarts_no_serving_pod_until_requested(
    steady: Service, operator_process: OperatorProcess, make: Make, client: Client
) -> None:
    """A new release's default image is for new services, and for those that are annotated to move."""
    mover = make("mover", profiling={"mode": "Skip"})
    mover.wait_updated()
    steady.wait_updated()
    before, image = uids(steady.pods()), steady.read()["status"]["runtimeImage"]
    operator_process.stop()
    new = "outrider.local/runtime-cpu:dev"
    operator_process.start(OUTRIDER_RUNTIME_IMAGE_CPU=new, OUTRIDER_RUNTIME_IMAGE_GPU=new)
    newer = make("newer", profiling={"mode": "Skip"})
    newer.wait_updated()
    assert newer.ready_pods()[0]["spec"]["containers"][0]["image"] == new
    assert uids(steady.pods()) == before
    assert steady.read()["status"]["runtimeImage"] == image
    wait_for("the mover to be behind", lambda: _is_behind(mover, new))
    client.patch(SERVICE, mover.namespace, mover.name, {"metadata": {"annotations": {UPGRADE_ANNOTATION: new}}})
    wait_for("the status at the new image", lambda: mover.read()["status"]["runtimeImage"] == new)
    mover.wait_updated()
    assert [pod["spec"]["containers"][0]["image"] for pod in mover.ready_pods()] == [new]
    assert not mover.read()["status"].get("newerRuntimeImage")
    client.delete(SERVICE, mover.namespace, mover.name)
    operator_process.stop()
    operator_process.start(OUTRIDER_RUNTIME_IMAGE_CPU=image, OUTRIDER_RUNTIME_IMAGE_GPU=image)


def test_a_share_of_the_fleet_moves_to_a_new_release(make: Make, operator_process: OperatorProcess) -> None:
    """The chart's share, raised step by step; a service that opts out stays, and its status says so."""
    fleet = _fleet(make, 3)
    for ship in fleet:
        ship.wait_updated()
    old = fleet[0].read()["status"]["runtimeImage"]
    new = "outrider.local/runtime-cpu:dev"
    first, second, last = fleet
    last.client.patch(SERVICE, last.namespace, last.name, {"metadata": {"annotations": {UPGRADE_ANNOTATION: "false"}}})
    for share, moved in ((_place_of(first) + 1, [first]), (100, [first, second])):
        operator_process.stop()
        operator_process.start(
            OUTRIDER_RUNTIME_IMAGE_CPU=new, OUTRIDER_RUNTIME_IMAGE_GPU=new, OUTRIDER_RUNTIME_UPGRADE_PERCENT=str(share)
        )
        for ship in moved:
            wait_for(f"{ship.name} at the new image", partial(_runs, ship, new))
        for ship in set(fleet) - set(moved):
            wait_for(f"{ship.name} to be behind", partial(_is_behind, ship, new))
            assert _runs(ship, old)
    operator_process.stop()
    operator_process.start(
        OUTRIDER_RUNTIME_IMAGE_CPU=old, OUTRIDER_RUNTIME_IMAGE_GPU=old, OUTRIDER_RUNTIME_UPGRADE_PERCENT="0"
    )


def test_only_one_operator_is_active(
    operator_process: OperatorProcess, cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    """A second one stands by, alive, and takes over when the first gives the Lease back."""
    wait_for("the first to lead", lambda: operator_process.metric("outrider_operator_leading") == 1)
    second = OperatorProcess(cluster.kubeconfig, tmp_path / "second.log", OUTRIDER_POD_NAME="second")
    second.start(OUTRIDER_METRICS_WINDOW=WINDOW)
    try:
        assert operator_process.metric("outrider_operator_leading") == 1
        assert second.metric("outrider_operator_leading") == 0
        assert operator_process.stop() == 0
        assert _holder(client) != "operator", "given back, not run out"
        wait_for("the second to lead", lambda: second.metric("outrider_operator_leading") == 1)
        assert _holder(client) == "second"
    finally:
        second.stop()
        operator_process.start()
    wait_for("the first to lead again", lambda: _holder(client) == "operator")


def test_deleting_a_service_removes_everything(make: Make, client: Client, operator_process: OperatorProcess) -> None:
    """Garbage collection deletes the children, so also while the operator is down."""
    up, down = make("goes-up"), make("goes-down")
    for service in (up, down):
        service.wait_updated()
        service.wait("ProfilesReady", "True")
    client.delete(SERVICE, up.namespace, up.name)
    wait_for("nothing to be left of it", lambda: _left(up) == [])
    operator_process.stop()
    client.delete(SERVICE, down.namespace, down.name)
    try:
        wait_for("nothing to be left of it", lambda: _left(down) == [])
    finally:
        operator_process.start()


def _fleet(make: Make, size: int) -> list[Service]:
    """Services of different places, in their order. The API server draws uids, and two of one place move together."""
    fleet: dict[int, Service] = {}
    numbers = itertools.count()
    while len(fleet) < size:
        ship = make(f"ship-{next(numbers)}", profiling={"mode": "Skip"}, replicas=0)
        fleet.setdefault(_place_of(ship), ship)
    return [ship for _, ship in sorted(fleet.items())]


def _place_of(service: Service) -> int:
    return upgrade_rank(service.read()["metadata"]["uid"])


def _runs(service: Service, image: str) -> bool:
    """The status says so, and the Deployment's pods are made of it."""
    pod = service.child(DEPLOYMENT)["spec"]["template"]["spec"]
    return bool(service.read()["status"]["runtimeImage"] == image == pod["containers"][0]["image"])


def _is_behind(service: Service, image: str) -> bool:
    return bool(service.read()["status"].get("newerRuntimeImage") == image)


def _other(document: dict[str, Any] | None, uid: str) -> dict[str, Any] | None:
    return document if document is not None and document["metadata"]["uid"] != uid else None


def _left(service: Service) -> list[str]:
    """Children that are still there, and profiles that only they used."""
    labelled = [child for kind in CHILDREN for child in service.children(kind)]
    profiles = [
        document
        for document in service.client.list(CONFIG_MAP, service.namespace, "outrider.dev/component=profile")
        if document["metadata"]["annotations"]["outrider.dev/model"] == f"tests/{service.name}"
    ]
    return [f"{child.get('kind')} {child['metadata']['name']}" for child in labelled + profiles]


def _holder(client: Client) -> str:
    lease = client.get(LEASE, NAMESPACE, "outrider-operator")
    return lease["spec"]["holderIdentity"] if lease else ""


def _writes(cluster: Cluster, namespace: str) -> list[str]:
    """What the operator wrote there: it is the only one with its user agent. (Elsewhere an earlier test's namespace
    may still be going.)"""
    written = [entry for entry in audit.writes(cluster.layout.audit) if entry.get("userAgent") == "outrider-operator"]
    objects = [(entry["verb"], entry["objectRef"]) for entry in written]
    return [f"{verb} {it['resource']} {it.get('name', '')}" for verb, it in objects if it.get("namespace") == namespace]
