"""One measurement of a model on a product for the whole cluster, from a namespace that the chart names."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from outrider_operator.kinds import CONFIG_MAP, JOB, POD, SERVICE

from tests.cluster import audit
from tests.cluster.cluster import Cluster
from tests.operator import manifests
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import PRIORITY_CLASS
from tests.operator.process import NAMESPACE, OperatorProcess

pytestmark = pytest.mark.cluster

PLATFORM, SECOND, TENANT = "shared-platform", "shared-second", "shared-tenant"
MEASURING = "outrider.dev/component=profiling"
SPEC: dict[str, Any] = {"target": {"name": "tests/for-all"}, "standin": {"profile_s": 2}}


@pytest.fixture(scope="module")
def namespaces(cluster: Cluster, operator_process: OperatorProcess) -> Generator[None, None, None]:
    """Two namespaces of a platform that measure for all, and a tenant's. The operator serves these alone."""
    watched = (PLATFORM, SECOND, TENANT)
    for name in watched:
        cluster.kubectl("create", "namespace", name)
    operator_process.stop()
    operator_process.start(
        OUTRIDER_PROFILING_SHARED_FROM=f"{PLATFORM},{SECOND}", OUTRIDER_WATCH_NAMESPACES=",".join(watched)
    )
    yield
    operator_process.stop()
    operator_process.start(OUTRIDER_PROFILING_SHARED_FROM="", OUTRIDER_WATCH_NAMESPACES="")
    for name in watched:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def _make(client: Client, namespace: str, name: str, **spec: Any) -> Service:
    client.create(SERVICE, manifests.service(name, namespace, **{**SPEC, **spec}))
    return Service(client, namespace, name)


def _shared(client: Client) -> list[str]:
    names = (document["metadata"]["name"] for document in client.list(CONFIG_MAP, NAMESPACE))
    return [name for name in names if name.startswith("outrider-shared-profile-")]


@pytest.mark.usefixtures("namespaces")
def test_one_job_serves_two_namespaces(cluster: Cluster, client: Client) -> None:
    """Each namespace measured the same model, with a second full set of accelerators. The tenant's forged copy, with
    the operator's own labels, changes nothing: its figures come from the operator's namespace."""
    platform = _make(client, PLATFORM, "canonical")
    platform.wait("ProfilesReady", "True", "Profiled")
    (shared,) = wait_for("the shared profile", lambda: _shared(client))
    forged = client.get(CONFIG_MAP, NAMESPACE, shared)
    assert forged is not None
    metadata = {"name": shared, "namespace": TENANT, "labels": forged["metadata"]["labels"]}
    client.create(CONFIG_MAP, {**forged, "metadata": metadata, "data": {"target.json": "{}"}})
    tenant = _make(client, TENANT, "user")
    tenant.wait("ProfilesReady", "True", "Profiled")
    # The status says it from the first look on, which writes nothing else.
    own = wait_for("its own copy", lambda: client.get(CONFIG_MAP, TENANT, shared.replace("-shared-", "-")))
    assert own["data"] == forged["data"]
    wait_for("its pod", lambda: tenant.ready_pods())
    assert audit.created(cluster.layout.audit, "jobs", TENANT) == []


@pytest.mark.usefixtures("namespaces")
def test_a_tenants_measurement_stays_in_its_namespace(client: Client) -> None:
    before = _shared(client)
    tenant = _make(client, TENANT, "own", target={"name": "tests/of-a-tenant"})
    tenant.wait("ProfilesReady", "True", "Profiled")
    wait_for("its Job to be gone", lambda: not client.list(JOB, TENANT))
    assert _shared(client) == before


@pytest.mark.usefixtures("namespaces")
def test_namespaces_that_measure_at_once_make_one_measurement(cluster: Cluster, client: Client) -> None:
    """A tenant and two namespaces of the platform, whose Jobs wait for room until all three have had their turn: one
    Job runs, and all have its figures. Two namespaces that saw no Job of each other both measured."""
    everywhere = (PLATFORM, SECOND, TENANT)
    for namespace in everywhere:
        cluster.apply(_no_room(namespace))
    made = [
        _make(client, namespace, "at-once", target={"name": "tests/at-once"}, standin={"profile_s": 5})
        for namespace in everywhere
    ]
    for service in made:
        service.wait("Ready", "True")
    wait_for("one Job", lambda: sum(len(client.list(JOB, namespace)) for namespace in everywhere) == 1)
    for namespace in everywhere:
        cluster.kubectl("delete", "resourcequota", "no-room", "-n", namespace)
    ran: set[str] = set()

    def all_are_profiled() -> bool:
        ran.update(namespace for namespace in everywhere if client.list(POD, namespace, MEASURING))
        return all(service.condition("ProfilesReady").get("reason") == "Profiled" for service in made)

    wait_for("the profiles", all_are_profiled)
    assert len(ran) == 1
    (name,) = {service.read()["status"]["profiles"][0]["configMap"] for service in made}
    first, *others = [service.child(CONFIG_MAP, name)["data"] for service in made]
    assert all(data == first for data in others)


def _no_room(namespace: str) -> dict[str, Any]:
    """No pod of profiling Jobs may be made."""
    scope = {"scopeName": "PriorityClass", "operator": "In", "values": [PRIORITY_CLASS]}
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-room", "namespace": namespace},
        "spec": {"hard": {"pods": "0"}, "scopeSelector": {"matchExpressions": [scope]}},
    }
