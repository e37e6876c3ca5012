"""Which services a change wakes: all that it matters to, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes.aio.client.configuration import Configuration as ClientConfiguration
from outrider_operator import telemetry
from outrider_operator.cache import Cache
from outrider_operator.configuration import Configuration
from outrider_operator.controller import Controller
from outrider_operator.decide import decide
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, JOB, POD, SERVICE
from outrider_operator.kubernetes_api import KubernetesApi
from outrider_operator.model import PROFILE, PROFILING, Settings

from tests.unit.operator.documents import deployment, document, labels, pod


class Woken:
    """A controller that watches nothing, its cache, and whom it has woken."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.cache: Cache = controller._cache

    async def names(self) -> set[str]:
        """Woken since the last call."""
        found = set[str]()
        while True:
            try:
                key = await asyncio.wait_for(self.controller._queue.get(), 0.05)
            except TimeoutError:
                return found
            self.controller._queue.done(key)
            found.add(key.name)


@pytest.fixture
async def woken():
    """Services "chat" and "mail", which share the profile "outrider-profile-a", and "apart", which does not."""
    api = KubernetesApi(ClientConfiguration())
    settings = Settings(runtime_image="gpu", runtime_cpu_image="cpu")
    woken = Woken(Controller(Configuration(namespace="ns", pod_name="operator"), api, settings, decide))
    for name in ("chat", "mail", "apart"):
        woken.cache.seen(SERVICE, _service(name, "b" if name == "apart" else "a"))
    await woken.names()
    yield woken
    await api.close()


async def test_a_child_wakes_its_service(woken: Woken) -> None:
    woken.cache.seen(DEPLOYMENT, deployment())
    assert await woken.names() == {"chat"}


async def test_a_pod_of_no_service_wakes_nobody_and_harms_nobody(woken: Woken) -> None:
    woken.cache.seen(POD, pod("stray", service=None))
    assert await woken.names() == set()
    woken.cache.seen(POD, pod("strange", service="not there"))
    assert await woken.names() == {"not there"}


@pytest.mark.parametrize(("kind", "component"), [(CONFIG_MAP, PROFILE), (JOB, PROFILING)])
async def test_a_profile_wakes_those_who_use_it(woken: Woken, kind: Any, component: str) -> None:
    """Every change of a Job woke all services of its namespace: with 300 of them, 300 times 300 reconciles."""
    shared = document("outrider-profile-a", 1)
    shared["metadata"]["labels"] = labels("chat", component)
    woken.cache.seen(kind, shared)
    assert await woken.names() == {"chat", "mail"}


async def test_the_count_of_services_falls_with_a_list(woken: Woken) -> None:
    """It told of services that were long gone."""
    assert _services() == 3
    relist = woken.cache.relist(SERVICE, None)
    relist.page([_service("chat", "a")])
    relist.end(9)
    assert _services() == 1


async def test_regular_looks_are_spread_over_their_interval(woken: Woken, monkeypatch) -> None:
    """A thousand services looked at in one go kept a change waiting for seconds."""
    pauses: list[tuple[float, int]] = []

    async def sleep(seconds: float) -> None:
        pauses.append((seconds, len(woken.controller._queue._waits)))

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        await woken.controller._look_at_each(60.0)
    assert pauses == [(20.0, 1), (20.0, 2), (20.0, 3)]


def _services() -> float:
    (metric,) = telemetry.SERVICES.collect()
    return metric.samples[0].value


def _service(name: str, profile: str) -> dict[str, Any]:
    status = {"profiles": [{"product": "cpu", "configMap": f"outrider-profile-{profile}"}]}
    return document(name, 1, uid=name, status=status)
