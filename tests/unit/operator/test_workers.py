"""Workers: no service waits for another that hangs, or for a reconcile that ended with the Lease."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest
from outrider_operator.cluster.cache import Key
from outrider_operator.cluster.kubernetes_api import KubernetesApi, Page
from outrider_operator.cluster.lease import Lease
from outrider_operator.cluster_model import Object, OperatorSettings
from outrider_operator.controller import gc_freeze
from outrider_operator.controller import service_controller as module
from outrider_operator.controller.reconcile import Reconciler
from outrider_operator.controller.service_controller import MOST_OF_A_NAMESPACE, WORKERS, ServiceController
from outrider_operator.decide import decide
from outrider_operator.kinds import SERVICE, ResourceKind

from tests.unit.operator.decide.world import manifest
from tests.unit.operator.taking_api import TakingApi

SETTINGS = OperatorSettings(namespace="ns", pod_name="operator")
KEYS = tuple(Key(f"ns-{number % 5}", f"s-{number}") for number in range(20))


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


async def test_silent_webhooks_delay_no_other_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three namespaces with sixteen services each had every worker: a bystander waited 114 s for its first status."""
    monkeypatch.setattr(module, "LONGEST_HOLD_S", 0.05)
    api, slow = HangingApi(), WORKERS // MOST_OF_A_NAMESPACE
    controller = _controller(api)
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


class ListedApi(TakingApi):
    """Lists the services of KEYS, and reports no change."""

    async def pages(self, kind: ResourceKind, namespace: str | None, selector: str) -> AsyncIterator[Page]:
        del namespace, selector
        yield Page([_service(key.name, key.namespace) for key in KEYS] if kind == SERVICE else [], "10")

    async def watch(
        self, kind: ResourceKind, namespace: str | None, selector: str, version: str
    ) -> AsyncIterator[tuple[str, Object]]:
        del namespace, selector, version
        await asyncio.Event().wait()
        yield kind.kind, {}


class UnsteadyLease:
    """Lost at random turns of the event loop, until it was lost `losses` times."""

    def __init__(self, losses: int, chance: random.Random) -> None:
        self.losses, self._chance = losses, chance
        self.is_held = False

    async def acquire(self) -> None:
        self.is_held = True

    async def renew(self) -> None:
        if not self.losses:
            await asyncio.Event().wait()
        for _ in range(self._chance.randrange(60)):
            await asyncio.sleep(0)
        self.losses -= 1
        self.is_held = False


class QuickReconciler:
    """Records the keys whose reconcile ended while the Lease was there to stay."""

    def __init__(self, lease: UnsteadyLease, chance: random.Random) -> None:
        self._lease, self._chance = lease, chance
        self.ended = set[Key]()

    async def reconcile(self, key: Key) -> float:
        for _ in range(self._chance.randrange(4)):
            await asyncio.sleep(0)
        if not self._lease.losses:
            self.ended.add(key)
        return 0.001


async def test_each_service_is_reconciled_after_lost_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that was handed out in the turn of the loss counted as running for ever: its service stood still."""
    monkeypatch.setattr(gc_freeze, "settle", lambda: None)  # would walk all objects of the tests 200 times
    chance = random.Random(7)
    lease = UnsteadyLease(200, chance)
    controller, reconciler = _controller(ListedApi(), lease), QuickReconciler(lease, chance)
    controller._reconciler = cast(Reconciler, reconciler)
    running = asyncio.create_task(controller._run())
    async with asyncio.timeout(60):
        while reconciler.ended != {*KEYS}:
            controller._wake_one(chance.choice(KEYS))
            await asyncio.sleep(0)
    assert lease.losses == 0
    running.cancel()


async def hang() -> None:
    await asyncio.Event().wait()


async def be_cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("end", [hang, be_cancelled])
async def test_a_reconcile_that_does_not_end_well_is_seen_and_repeated(
    end: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service whose reconcile hung, or whose future another task cancelled, stood still, and liveness was fine."""
    monkeypatch.setattr(module, "STUCK_AFTER_S", 0.0)
    monkeypatch.setattr(module, "LONGEST_RECONCILE_S", 0.05)
    controller, began = _controller(TakingApi()), list[bool]()

    class Ending:
        async def reconcile(self, _: Key) -> None:
            await asyncio.sleep(0.001)
            began.append(controller.is_stuck())
            await end()

    controller._reconciler = cast(Reconciler, Ending())
    controller._wake_one(KEYS[0])
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        worker = group.create_task(controller._worker(group))
        while len(began) < 2:
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    assert worker.cancelled()
    assert began[:2] == [True, True]
    assert not controller.is_stuck()


def _controller(api: TakingApi, lease: UnsteadyLease | None = None) -> ServiceController:
    return ServiceController(SETTINGS, cast(KubernetesApi, api), cast(Lease, lease), decide)


def _service(name: str, namespace: str) -> Object:
    service = manifest(name, replicas=0, profiling={"mode": "Skip"})
    metadata = {"name": name, "namespace": namespace, "uid": f"{namespace}-{name}", "resourceVersion": "1"}
    return {**service, "metadata": {**metadata, "generation": 1}}
