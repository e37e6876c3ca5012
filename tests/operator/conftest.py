"""The operator under test: a process of this machine, on the session's real cluster, with the stand-in runtime."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator
from typing import Any

import pytest
from outrider_crds.generate import CRD_FILE, CRD_NAME
from outrider_operator.kinds import SERVICE

from tests.cluster.cluster import Cluster
from tests.operator import manifests
from tests.operator.client import Client, Service
from tests.operator.process import NAMESPACE, OperatorProcess

PRIORITY_CLASS = "outrider-profiling"
WINDOW = "12s"
RESYNC = "60s"
"""Resync interval as shipped: a short one would hide a missing wake-up."""

Make = Callable[..., Service]


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Client:
    """The session's cluster, with the CRD and the operator's namespace."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD_FILE))
    cluster.wait_established(f"crd/{CRD_NAME}")
    cluster.kubectl("create", "namespace", NAMESPACE)
    # As the chart makes it.
    cluster.kubectl("create", "priorityclass", PRIORITY_CLASS, "--value=-5", "--preemption-policy=Never")
    return Client(str(cluster.kubeconfig))


@pytest.fixture(scope="package")
def operator_process(
    cluster: Cluster, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> Generator[OperatorProcess, None, None]:
    """The one operator of these tests. A test that stops it starts it again."""
    del client
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    variables = {
        "OUTRIDER_METRICS_WINDOW": WINDOW,
        "OUTRIDER_RESYNC_INTERVAL": RESYNC,
        "OUTRIDER_PROFILING_PRIORITY_CLASS": PRIORITY_CLASS,
    }
    process = OperatorProcess(cluster.kubeconfig, log, **variables)
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, client: Client, request: pytest.FixtureRequest) -> Generator[str, None, None]:
    """A namespace of the module's own; it goes with all that is in it."""
    del client
    name = (
        f"{request.module.__name__.rsplit('.', 1)[-1].removeprefix('test_').replace('_', '-')}-{uuid.uuid4().hex[:4]}"
    )
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def make(client: Client, namespace: str, operator_process: OperatorProcess) -> Make:
    """Creates a service in the module's namespace: make("name", standin={...}, **spec)."""
    del operator_process

    def create(name: str, **spec: Any) -> Service:
        client.create(SERVICE, manifests.service(name, namespace, **spec))
        return Service(client, namespace, name)

    return create
