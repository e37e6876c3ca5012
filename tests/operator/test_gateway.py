"""`gateway.inferencePool` on a real API server, with the extension's own CRD: made, guarded, taken away."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import pytest
from outrider_operator.kinds import INFERENCE_POOL, SERVICE

from setup import binaries
from tests.cluster.cluster import Cluster
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import Make

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
    crd = f"crd/{INFERENCE_POOL.plural}.{INFERENCE_POOL.group}"
    wait = ("wait", "--for=condition=Established", crd, "--timeout=30s")
    wait_for("the CRD", lambda: cluster.try_kubectl(*wait).returncode == 0)
    yield cluster
    cluster.kubectl("delete", "-f", file, "--wait=false")


def test_service_without_the_extension_serves_and_says_so(early: Service) -> None:
    """The route is missing; the pods are not."""
    assert "install its CRDs" in early.wait(READY, "False", "NotInstalled")["message"]
    early.wait("Updated", "True")


def test_pool_is_made_once_the_extension_is_there(extension: Cluster, early: Service) -> None:
    """The operator looks for the extension every minute. The API server takes it by the extension's own schema."""
    del extension
    early.wait(READY, "True", "PoolCurrent")
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
    early.wait(READY, "True", "PoolCurrent")
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
    service.wait(READY, "True", "PoolCurrent")


def test_pool_goes_with_the_wish_and_with_the_service(extension: Cluster, make: Make, client: Client) -> None:
    del extension
    service = make("leaving", **ON, **SKIP)
    gone = partial(_is_gone, client, service)
    service.wait(READY, "True", "PoolCurrent")
    service.patch({"gateway": {"inferencePool": False}})
    wait_for("its end", gone)
    service.wait(READY, "Unknown", "NotRequested")
    service.patch({"gateway": {"inferencePool": True}})
    service.wait(READY, "True", "PoolCurrent")
    client.delete(SERVICE, service.namespace, service.name)
    wait_for("garbage collection", gone)


def _is_gone(client: Client, service: Service) -> bool:
    return client.get(INFERENCE_POOL, service.namespace, service.name) is None
