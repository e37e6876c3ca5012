"""`gateway.inferencePool` on a cluster with the extension's own CRD and endpoint picker: the pool is made, guarded and
taken away, and requests come through Envoy to the pod that the picker chose."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest
from outrider_crds.runtime_config import ADMIN_PORT, SERVING_PORT
from outrider_operator.kinds import INFERENCE_POOL, SERVICE

from setup import binaries
from tests.cluster.cluster import Cluster
from tests.operator.chart.platforms import reaches
from tests.operator.chart.release import rendered, values
from tests.operator.client import Client, Service, is_ready, wait_for
from tests.operator.conftest import Make
from tests.operator.gateway import GATEWAY_PORT, STEERING_HEADER, run_envoy, run_picker
from tests.operator.process import OperatorProcess
from tests.operator.standin.serve import ECHO_PATH

pytestmark = pytest.mark.cluster

SKIP = {"profiling": {"mode": "Skip"}}
ON = {"gateway": {"inferencePool": True}}
READY = "InferencePoolReady"


@pytest.fixture(scope="module")
def early(make: Make) -> Service:
    """A service that asks for a pool before the extension is installed."""
    service = make("early", **ON, **SKIP)
    service.wait("Ready", "True")
    return service


@pytest.fixture(scope="module")
def extension(cluster: Cluster, early: Service) -> Generator[Cluster, None, None]:
    """The cluster, with the CRD from here on."""
    early.wait(READY, "False", "NotInstalled")
    file = str(binaries.inference_pool_crd())
    cluster.kubectl("apply", "--server-side", "-f", file)
    cluster.wait_established(f"crd/{INFERENCE_POOL.plural}.{INFERENCE_POOL.group}")
    yield cluster
    cluster.kubectl("delete", "-f", file, "--wait=false")


def test_service_without_the_extension_serves_and_says_so(early: Service) -> None:
    """The route is missing; the pods are not."""
    assert "install its CRDs" in early.wait(READY, "False", "NotInstalled")["message"]
    early.wait("Updated", "True")


def test_pool_is_made_once_the_extension_is_there(extension: Cluster, early: Service) -> None:
    """The operator looks for the extension every minute. The API server takes it by the extension's own schema."""
    del extension
    early.wait(READY, "Unknown", "NotAttached")
    pool = early.child(INFERENCE_POOL)
    assert pool["metadata"]["ownerReferences"][0]["uid"] == early.read()["metadata"]["uid"]
    labels = pool["spec"]["selector"]["matchLabels"].items()
    assert all(labels <= pod["metadata"]["labels"].items() for pod in early.pods())
    before = pool["metadata"]["resourceVersion"]
    early.annotate(touched="1")
    early.annotate(touched="2")
    assert early.child(INFERENCE_POOL)["metadata"]["resourceVersion"] == before, "an idle operator writes nothing"


def test_pool_changed_by_hand_is_put_right(extension: Cluster, early: Service, client: Client) -> None:
    """Custom resources take no strategic merge patch: the operator's claim of the object was a 415 at each look."""
    del extension
    early.wait(READY, "Unknown", "NotAttached")
    client.patch(INFERENCE_POOL, early.namespace, early.name, {"spec": {"targetPorts": [{"number": 9000}]}})
    early.annotate(touched="3")  # no watch tells of it
    wait_for("port 8000", lambda: early.child(INFERENCE_POOL)["spec"]["targetPorts"] == [{"number": 8000}])


def test_foreign_pool_is_left_alone_and_the_service_serves(
    extension: Cluster, make: Make, client: Client, namespace: str
) -> None:
    """A condition with a sentence; everything else goes on."""
    del extension
    spec: dict[str, Any] = {
        "selector": {"matchLabels": {"app": "another"}},
        "targetPorts": [{"number": 80}],
        "endpointPickerRef": {"name": "theirs", "port": {"number": 1}},
    }
    made = client.create(INFERENCE_POOL, {"metadata": {"name": "taken", "namespace": namespace}, "spec": spec})
    service = make("taken", **ON, **SKIP)
    message = service.wait(READY, "False", "NameConflict")["message"]
    assert "InferencePool taken was not made by Outrider and is left alone" in message
    service.wait("Ready", "True")
    service.wait("SpecValid", "True")
    service.wait("Updated", "True")
    assert service.child(INFERENCE_POOL) == made
    client.delete(INFERENCE_POOL, namespace, "taken")
    service.annotate(touched="1")  # no watch tells of it
    service.wait(READY, "Unknown", "NotAttached")


def test_pool_goes_with_the_wish_and_with_the_service(extension: Cluster, make: Make, client: Client) -> None:
    del extension
    service = make("leaving", **ON, **SKIP)
    gone = partial(_is_gone, client, service)
    service.wait(READY, "Unknown", "NotAttached")
    service.patch({"gateway": {"inferencePool": False}})
    wait_for("its end", gone)
    service.wait(READY, "Unknown", "NotRequested")
    service.patch({"gateway": {"inferencePool": True}})
    service.wait(READY, "Unknown", "NotAttached")
    client.delete(SERVICE, service.namespace, service.name)
    wait_for("garbage collection", gone)


@pytest.fixture(scope="module")
def gateway(
    extension: Cluster, make: Make, operator_process: OperatorProcess, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[Service, str], None, None]:
    """A service of two pods whose admin port is closed to all but the operator and the picker; and the URL of an Envoy
    before its pool."""
    peers = json.dumps([{"ipBlock": {"cidr": f"{extension.machine_address}/32"}}])
    documents = rendered(extension, tmp_path_factory.mktemp("chart"), values())
    (role,) = [it for it in documents if it["metadata"]["name"].endswith(":endpoint-picker")]
    extension.apply(role)
    with operator_process.restarted(OUTRIDER_ADMIN_PORT_PEERS=peers):
        service = make("routed", replicas=2, **ON, **SKIP)
        run_picker(extension, binaries.endpoint_picker(), service.name, service.namespace, role["metadata"]["name"])
        picker = extension.get("service", f"{service.name}-epp", namespace=service.namespace)["spec"]["clusterIP"]
        run_envoy(extension, binaries.envoy(), "gateway", service.namespace, picker)
        service.wait_updated()
        service.annotate(touched="1")  # no watch tells of the picker's Service
        address = wait_for("the gateway", lambda: _ready_address(extension, "gateway", service.namespace))
        yield service, f"http://{address}:{GATEWAY_PORT}"


def test_gateway_sends_requests_where_the_picker_says(gateway: tuple[Service, str]) -> None:
    """Envoy asks the picker, which knows the pods by the pool, and reaches the one that is chosen. A client's SLO
    arrives with the request. (The picker answers requests without a body alone; llm-d's reads the prompt.)"""
    service, url = gateway
    pods = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in service.ready_pods()}
    assert len(pods) == 2
    wait_for("a way to both pods", lambda: all(_echo(url, **{STEERING_HEADER: address}) for address in pods.values()))
    for name, address in 3 * list(pods.items()):
        answer = _echo(url, **{STEERING_HEADER: address, "x-llm-d-slo-ttft-ms": "1500"})
        assert answer is not None
        assert answer["pod"] == name
        assert answer["headers"]["x-llm-d-slo-ttft-ms"] == "1500"


def test_picker_spreads_requests_over_the_pods_of_the_pool(gateway: tuple[Service, str]) -> None:
    """The picker takes the pods in turn where a request names none."""
    service, url = gateway
    wait_for("an answer", lambda: _echo(url))
    answers = [_echo(url) for _ in range(6)]
    assert {answer["pod"] for answer in answers if answer} == {pod["metadata"]["name"] for pod in service.ready_pods()}


def test_network_policy_lets_the_picker_read_metrics(gateway: tuple[Service, str], extension: Cluster) -> None:
    """Port 9000 has the series that pickers score by. The gateway, which needs none of them, stays out."""
    service, _ = gateway
    address = service.ready_pods()[0]["status"]["podIP"]
    can = partial(reaches, extension, namespace=service.namespace, address=address)
    wait_for("the picker to be let in", lambda: can(f"{service.name}-epp", port=ADMIN_PORT))
    assert can("gateway", port=SERVING_PORT)
    assert not can("gateway", port=ADMIN_PORT)


def _ready_address(cluster: Cluster, pod: str, namespace: str) -> str:
    document = cluster.get("pod", pod, namespace=namespace)
    return str(document["status"].get("podIP", "")) if is_ready(document) else ""


def _echo(url: str, **headers: str) -> dict[str, Any] | None:
    """Answer of a pod through the gateway; None while there is no way to one."""
    request = urllib.request.Request(f"{url}{ECHO_PATH}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            document: dict[str, Any] = json.load(answer)
    except OSError:
        return None
    return document


def _is_gone(client: Client, service: Service) -> bool:
    return client.get(INFERENCE_POOL, service.namespace, service.name) is None
