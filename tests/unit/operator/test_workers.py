"""Workers: no service waits for writes of other services that hang."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from outrider_operator import service_controller as module
from outrider_operator.cluster_model import Object, OperatorSettings
from outrider_operator.configuration import Configuration
from outrider_operator.decide import decide
from outrider_operator.kinds import SERVICE
from outrider_operator.kubernetes_api import KubernetesApi
from outrider_operator.service_controller import MOST_OF_A_NAMESPACE, WORKERS, ServiceController

from tests.unit.operator.decide.world import manifest
from tests.unit.operator.taking_api import TakingApi


class HangingApi(TakingApi):
    """Creates of namespaces that are called slow are not answered."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging = 0
        self.bystander = asyncio.Event()

    async def create(self, document: Object) -> Object:
        if document["metadata"]["namespace"].startswith("slow"):
            self.hanging += 1
            await asyncio.Event().wait()
        self.bystander.set()
        return await super().create(document)


async def test_webhooks_of_some_namespaces_that_do_not_answer_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three namespaces with sixteen services each had every worker: a bystander waited 114 s for its first status."""
    monkeypatch.setattr(module, "LONGEST_HOLD_S", 0.05)
    api, slow = HangingApi(), WORKERS // MOST_OF_A_NAMESPACE
    settings = OperatorSettings(runtime_image="gpu", runtime_cpu_image="cpu")
    controller = ServiceController(
        Configuration(namespace="ns", pod_name="operator"), cast(KubernetesApi, api), settings, decide
    )
    for namespace in range(slow):
        for number in range(MOST_OF_A_NAMESPACE + 1):
            controller._cache.seen(SERVICE, _service(f"s-{number}", f"slow-{namespace}"))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        workers = [group.create_task(controller._worker(group)) for _ in range(WORKERS)]
        while api.hanging < WORKERS:
            await asyncio.sleep(0.01)
        controller._cache.seen(SERVICE, _service("bystander", "quick"))
        await api.bystander.wait()
        assert api.hanging == slow * MOST_OF_A_NAMESPACE, "no more than that of a namespace"
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    assert all(worker.cancelled() for worker in workers)


def _service(name: str, namespace: str) -> Object:
    service = manifest(name, replicas=0, profiling={"mode": "Skip"})
    metadata = {"name": name, "namespace": namespace, "uid": f"{namespace}-{name}", "resourceVersion": "1"}
    return {**service, "metadata": {**metadata, "generation": 1}}
