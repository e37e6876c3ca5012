"""A tenant's pods and objects, odd by mistake or on purpose: they affect only that tenant."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from outrider_crds.runtime_config import ADMIN_PORT
from outrider_operator.decide.desired.revisions import TEMPLATE_KEY
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, POD, SERVICE

from tests.operator.client import Client, RefusedError, Service, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster

SERVING = {"app.kubernetes.io/managed-by": "outrider", "outrider.dev/component": "serving"}
PROBES_FAIL_S = 30.0
"""Three probes in a row that fail, five seconds apart, make a pod unready. (One may fail where the machine is busy.)"""
OPEN_FILES = 4096
BALLAST = int(os.environ.get("BALLAST", "60"))
"""ConfigMaps of 900 kB."""
MOST_GROWTH_MB = 30
UNFIT = "outrider_operator_unfit_total"


@pytest.fixture(scope="module")
def victim(make: Make) -> Service:
    """A service of another tenant; the other tests' pods are no business of it."""
    service = make("victim", replicas=1, profiling={"mode": "Skip"})
    service.wait_updated()
    return service


def test_a_pod_without_its_service_label_ends_nothing(
    victim: Service, make: Make, client: Client, operator_process: OperatorProcess
) -> None:
    """The polls raised KeyError; the operator ended three times in a minute, and new services got no status."""
    (pod,) = victim.ready_pods()
    before = operator_process.metric(UNFIT)
    client.patch(
        POD, victim.namespace, pod["metadata"]["name"], {"metadata": {"labels": {"outrider.dev/service": None}}}
    )
    client.create(POD, _pod("stray", victim.namespace, SERVING))
    wait_for("the operator to see it", lambda: operator_process.metric(UNFIT) > before)
    make("newcomer", replicas=0, profiling={"mode": "Skip"}).wait("SpecValid", "True")
    assert operator_process.running()
    assert "KeyError" not in operator_process.log_text()
    victim.wait_updated()


def test_a_foreign_pod_with_a_services_labels_is_not_its_pod(make: Make, client: Client) -> None:
    """It counted as ready."""
    service = make("lent", replicas=0, profiling={"mode": "Skip"})
    service.wait("SpecValid", "True")
    labels = {**SERVING, "app.kubernetes.io/name": "outrider", "outrider.dev/service": "lent"}
    client.create(POD, _pod("borrower", service.namespace, labels))
    wait_for("the pod to run", lambda: _is_running(client, service.namespace, "borrower"))
    service.patch({"paused": True})
    service.wait("Progressing", "False", "Paused")
    assert service.read()["status"].get("readyReplicas", 0) == 0
    assert service.condition("Ready")["status"] == "False"


@pytest.mark.parametrize("answer", ["digits", "huge", "endless"])
def test_a_state_that_is_none_is_no_answer_and_no_more(make: Make, victim: Service, answer: str) -> None:
    """A counter of 400 digits ended the polls of all services; 10^30 tokens had the status refused for ever."""
    service = make(f"says-{answer}", standin={"answer": answer}, replicas=1, profiling={"mode": "Skip"})
    updated = service.wait("Updated", "False", "ConfigPending")
    assert "no answer on its state endpoint" in updated["message"]
    service.wait("Ready", "True")
    victim.wait_updated()


def test_a_state_that_comes_in_two_parts_is_heard(make: Make) -> None:
    """What a slow network does to every state: Updated stayed False for ever."""
    make("halves", standin={"answer": "halves"}, replicas=1, profiling={"mode": "Skip"}).wait_updated()


def test_a_service_that_is_too_large_has_a_condition(make: Make, victim: Service) -> None:
    """The API server takes it, and 600 of them would end the operator for all services."""
    env = [{"name": f"BALLAST_{number}", "value": "x" * 4000} for number in range(32)]
    verdict = make("ballast", podTemplate={"env": env}).wait("SpecValid", "False")
    assert verdict["reason"] == "InvalidSpec"
    assert "64 KiB" in verdict["message"]
    victim.wait_updated()


def test_writing_config_maps_creates_no_pods_of_ones_own(victim: Service, client: Client) -> None:
    """The pod template of a revision stands in a ConfigMap: one with the node's files in it is replaced, never run."""
    name, namespace = f"{victim.name}-{victim.revision}", victim.namespace
    genuine = victim.child(CONFIG_MAP, name)
    template = json.loads(genuine["data"][TEMPLATE_KEY])
    template["spec"]["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    copied = {field: genuine["metadata"][field] for field in ("name", "namespace", "labels", "ownerReferences")}
    forged = {"metadata": copied, "immutable": True, "data": {**genuine["data"], TEMPLATE_KEY: json.dumps(template)}}

    def forge() -> bool:
        try:
            client.delete(CONFIG_MAP, namespace, name)
            client.create(CONFIG_MAP, forged)
        except RefusedError:  # the operator was quicker
            return False
        return True

    wait_for("the forged ConfigMap", forge)
    before = uids(victim.ready_pods())
    victim.patch({"replicas": 2})
    wait_for("the genuine ConfigMap", lambda: _data(client, namespace, name) == genuine["data"])
    victim.wait_updated()
    pod = victim.child(DEPLOYMENT)["spec"]["template"]["spec"]
    assert "host" not in [volume["name"] for volume in pod["volumes"]]
    assert uids(victim.ready_pods()) >= before
    victim.patch({"replicas": 1})


def test_a_flood_of_the_admin_port_leaves_the_pod_ready(make: Make) -> None:
    """Any pod of the cluster can connect to it: the real kubelet's probes are answered meanwhile."""
    service = make("flooded", standin={"answer": "real"}, replicas=1, profiling={"mode": "Skip"})
    service.wait_updated()
    (pod,) = service.ready_pods()
    with _flood(pod["status"]["podIP"]) as opened:
        wait_for("many connections", lambda: len(opened) > 2000)
        deadline = time.monotonic() + PROBES_FAIL_S
        while time.monotonic() < deadline:
            time.sleep(1)
            assert [entry["metadata"]["uid"] for entry in service.ready_pods()] == [pod["metadata"]["uid"]]
    (after,) = service.pods()
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0


def test_foreign_objects_with_the_operators_label_take_no_memory(
    client: Client, victim: Service, operator_process: OperatorProcess
) -> None:
    """600 ConfigMaps of 900 kB ended the operator; with an owner typed in by hand they were kept. So with lists."""
    before, unfit = operator_process.memory_mb(), operator_process.metric(UNFIT)
    uid = victim.read()["metadata"]["uid"]
    owners = [{"apiVersion": SERVICE.api_version, "kind": SERVICE.kind, "name": victim.name, "uid": uid}]
    for number in range(BALLAST):
        metadata: dict[str, Any] = {"name": f"ballast-{number}", "namespace": victim.namespace, "labels": SERVING}
        metadata |= {"ownerReferences": owners} if number % 2 else {}
        client.create(CONFIG_MAP, {"metadata": metadata, "data": {"blob": "x" * 900_000}})
    wait_for("the operator to see them", lambda: operator_process.metric(UNFIT) >= unfit + BALLAST // 2)
    victim.patch({"replicas": 2})
    victim.wait_updated()
    assert operator_process.memory_mb() < before + MOST_GROWTH_MB
    operator_process.stop()
    operator_process.start()
    victim.patch({"replicas": 1})
    victim.wait_updated()
    assert operator_process.memory_mb() < before + MOST_GROWTH_MB


def _data(client: Client, namespace: str, name: str) -> dict[str, str]:
    stored: dict[str, str] = (client.get(CONFIG_MAP, namespace, name) or {}).get("data", {})
    return stored


@contextmanager
def _flood(address: str) -> Iterator[list[socket.socket]]:
    """Two hundred connections a second, each left open with half a request."""
    opened: list[socket.socket] = []
    over = threading.Event()

    def flood() -> None:
        while not over.wait(0.05):
            for _ in range(10):
                with suppress(OSError):
                    connection = socket.create_connection((address, ADMIN_PORT), timeout=1)
                    opened.append(connection)
                    connection.sendall(b"GET /readyz HTTP/1.1\r\n")
            for old in opened[: -OPEN_FILES // 2]:
                old.close()

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], OPEN_FILES), limits[1]))
    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        yield opened
    finally:
        over.set()
        flooding.join()
        for connection in opened:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _pod(name: str, namespace: str, labels: dict[str, str]) -> dict[str, Any]:
    container = {"name": "sleep", "image": "outrider.local/standin:dev", "command": ["/bin/sleep", "3600"]}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }


def _is_running(client: Client, namespace: str, name: str) -> bool:
    pod = client.get(POD, namespace, name)
    return pod is not None and pod["status"].get("phase") == "Running"
