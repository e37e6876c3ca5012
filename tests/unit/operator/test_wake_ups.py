"""Which services a change wakes: all that it matters to, and no others."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, cast

import pytest
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster.lease import Lease
from outrider_operator.cluster_model import JOB_NAME_LABEL, PROFILE, PROFILING, SHARED_PROFILE, OperatorSettings
from outrider_operator.controller.service_controller import ServiceController
from outrider_operator.decide import decide
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, JOB, POD, SERVICE, ResourceKind
from outrider_operator.operator_metrics import telemetry

from tests.unit.operator.decide.world import manifest
from tests.unit.operator.documents import deployment, document, labels, owned_by, pod
from tests.unit.operator.taking_api import TakingApi

LONG_AGO = "2020-01-01T00:00:00Z"


class Woken:
    """A controller that watches nothing, its cache, and the services that it woke."""

    def __init__(self, controller: ServiceController) -> None:
        self.controller = controller
        self.cache: ObjectCache = controller._cache

    async def names(self) -> set[str]:
        """Woken since the last call."""
        result = set[str]()
        while True:
            try:
                key = await asyncio.wait_for(self.controller._queue.get(), 0.05)
            except TimeoutError:
                return result
            self.controller._queue.release(key)
            result.add(key.name)

    async def look(self, name: str, *, gone: bool = False) -> None:
        """Reconcile, until there is nothing to do at once."""
        if gone:
            self.cache.gone(SERVICE, _service(name))
        while await self.controller._reconciler.reconcile(Key("ns", name)) == 0.0:
            pass

    def profile(self, name: str) -> str:
        """The one that the service waits for."""
        (profile,) = self.controller._users._names[Key("ns", name)]
        return profile


@pytest.fixture
async def woken() -> Woken:
    """Services "chat" and "mail", which wait for one profile, and "apart", which waits for another."""
    api, lease = cast(KubernetesApi, TakingApi()), cast(Lease, None)
    woken = Woken(ServiceController(OperatorSettings(namespace="ns", pod_name="operator"), api, lease, decide))
    for name in ("chat", "mail", "apart"):
        woken.cache.seen(SERVICE, _service(name))
    await woken.names()
    for name in ("apart", "chat", "mail"):
        await woken.look(name)
    await woken.names()
    return woken


async def test_a_child_wakes_its_service(woken: Woken) -> None:
    woken.cache.seen(DEPLOYMENT, deployment())
    assert await woken.names() == {"chat"}


async def test_a_pod_of_no_service_wakes_no_service(woken: Woken) -> None:
    woken.cache.seen(POD, pod("stray", service=None))
    assert await woken.names() == set()
    woken.cache.seen(POD, pod("strange", service="not there"))
    assert await woken.names() == {"not there"}


@pytest.mark.parametrize("news", [(CONFIG_MAP, PROFILE), (JOB, PROFILING), (POD, PROFILING)], ids=str)
async def test_a_profile_wakes_the_services_that_use_it(woken: Woken, news: tuple[ResourceKind, str]) -> None:
    """Nothing is measured yet, so no status names it: the end of the first Job woke no service, for up to a minute.

    Every change of a Job woke all services of its namespace before that: with 300 of them, 300 times 300 reconciles.
    """
    kind, component = news
    shared = document(woken.profile("chat") if kind != POD else "its-pod", 99, uid="shared")
    shared["metadata"]["labels"] = {**labels("chat", component), JOB_NAME_LABEL: woken.profile("chat")}
    shared["metadata"]["ownerReferences"] += owned_by("Job", "job")
    woken.cache.seen(kind, shared)
    assert await woken.names() == {"chat", "mail"}


async def test_what_one_service_writes_others_hear_of(woken: Woken) -> None:
    """The operator's own writes woke no other service: those that share the profile waited for a resync."""
    job = woken.cache.get(JOB, "ns", woken.profile("chat"))
    assert job is not None
    done = copy.deepcopy(job)
    done["metadata"]["resourceVersion"] = "99"
    done["status"] = {"conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": LONG_AGO}]}
    woken.cache.seen(JOB, done)
    await woken.names()
    await woken.look("chat")
    assert woken.cache.get(CONFIG_MAP, "ns", woken.profile("chat")) is not None, "its failure is stored"
    assert await woken.names() == {"mail"}


async def test_a_service_that_joins_a_measurement_wakes_no_other(woken: Woken) -> None:
    """Each of 300 services that share a profile would wake the others, 64 times."""
    woken.cache.seen(SERVICE, _service("third"))
    await woken.names()
    await woken.look("third")
    job = woken.cache.get(JOB, "ns", woken.profile("chat"))
    assert job is not None
    assert "third" in {owner["name"] for owner in job["metadata"]["ownerReferences"]}
    assert await woken.names() == set()


async def test_a_service_that_goes_is_woken_by_no_profile(woken: Woken) -> None:
    await woken.look("chat", gone=True)
    await woken.names()
    shared = document(woken.profile("mail"), 99, uid="shared")
    shared["metadata"]["labels"] = labels("chat", PROFILE)
    woken.cache.seen(CONFIG_MAP, shared)
    assert await woken.names() == {"mail"}


async def test_the_count_of_services_falls_with_a_list(woken: Woken) -> None:
    """It reported services that were long gone."""
    assert _services() == 3
    woken.cache.listed(SERVICE, None, {("ns", "chat")}, 999)
    assert _services() == 1


async def test_regular_looks_are_spread_over_their_interval(woken: Woken, monkeypatch) -> None:
    """A thousand services looked at in one go kept a change waiting for seconds."""
    pauses: list[tuple[float, int]] = []

    async def sleep(seconds: float) -> None:
        pauses.append((seconds, len(woken.controller._queue._waits)))

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        await woken.controller._wake_slowly(60.0)
    assert pauses == [(20.0, 1), (20.0, 2), (20.0, 3)]


def _services() -> float:
    (metric,) = telemetry.SERVICES.collect()
    return metric.samples[0].value


def _service(name: str) -> dict[str, Any]:
    """One that waits for its profile."""
    target = "org/other" if name == "apart" else "org/target"
    result = manifest(name, target={"name": target}, profiling={"mode": "Required"})
    return {**result, "metadata": {**result["metadata"], "namespace": "ns", "resourceVersion": "1"}}


@pytest.mark.parametrize(("namespace", "woken_names"), [("ns", {"chat", "mail"}), ("tenant", set[str]())])
async def test_a_shared_profile_wakes_its_users(woken: Woken, namespace: str, woken_names: set[str]) -> None:
    """Those of all namespaces; a tenant's ConfigMap of that name wakes no service."""
    name = woken.profile("chat").replace("outrider-profile", "outrider-shared-profile")
    shared = document(name, 1, namespace)
    shared["metadata"] |= {"labels": labels(None, SHARED_PROFILE), "ownerReferences": []}
    woken.cache.seen(CONFIG_MAP, shared)
    assert await woken.names() == woken_names
