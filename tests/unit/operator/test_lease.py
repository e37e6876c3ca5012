"""The Lease: its holder, and how long renewals may fail."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import cast

import pytest
from outrider_operator.cluster import lease as module
from outrider_operator.cluster.api_error import ApiError
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster.lease import Lease, LoopThread
from outrider_operator.cluster_model import Object
from outrider_operator.kinds import ResourceKind


class Api:
    """Holds one Lease; while `away` it answers nothing else than that."""

    def __init__(self) -> None:
        self.away = False
        self.asked = 0
        self.lease: Object | None = None
        self.version = 100

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> Object | None:
        del kind, namespace, name
        self.asked += 1
        if self.away:
            raise ApiError(503, "", "later")
        return copy.deepcopy(self.lease)

    async def create(self, document: Object) -> Object:
        self.version += 1
        self.lease = copy.deepcopy(document)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    replace = create


def _lease(api: Api, identity: str = "me") -> Lease:
    return Lease(LoopThread("lease"), cast(KubernetesApi, api), "ns", "lease", identity)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RENEW_EVERY_S", 0.0), ("RETRY_EVERY_S", 0.0), ("GIVE_UP_AFTER_S", 0.2), ("SETTLE_S", 0.0)):
        monkeypatch.setattr(module, name, seconds)


@pytest.mark.usefixtures("quick")
async def test_a_renewal_that_fails_for_a_moment_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape in that moment saw no condition of any service, and each alert began its `for:` again."""
    monkeypatch.setattr(module, "GIVE_UP_AFTER_S", 3600.0)
    api = Api()
    lease = _lease(api)
    await lease.acquire()
    keeping = asyncio.create_task(lease.renew())
    api.away, before = True, api.asked
    while api.asked < before + 3:
        await asyncio.sleep(0)
    assert lease.is_held
    api.away = False
    await asyncio.sleep(0.05)
    assert lease.is_held
    keeping.cancel()


@pytest.mark.usefixtures("quick")
async def test_a_lease_that_cannot_be_renewed_is_given_up() -> None:
    """Another operator may hold it by now: this one stops working and reports no service."""
    api = Api()
    lease = _lease(api)
    await lease.acquire()
    api.away = True
    await asyncio.wait_for(lease.renew(), 60)
    assert not lease.is_held


@pytest.mark.usefixtures("quick")
async def test_a_lease_that_another_took_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone deleted it and another operator made its own: for ten seconds both worked."""
    monkeypatch.setattr(module, "GIVE_UP_AFTER_S", 3600.0)
    api = Api()
    lease = _lease(api)
    await lease.acquire()
    api.lease = None
    other = _lease(api, "other")
    await other.acquire()
    await asyncio.wait_for(lease.renew(), 60)
    assert not lease.is_held


@pytest.mark.usefixtures("quick")
async def test_a_new_lease_counts_once_its_former_holder_has_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of a deleted Lease renews every few seconds and knows nothing until then."""
    api, pauses = Api(), list[float]()

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(module, "SETTLE_S", 10.0)
    monkeypatch.setattr("outrider_operator.cluster.lease.asyncio.sleep", sleep)
    lease = _lease(api)
    await lease.acquire()
    assert pauses == [10.0]
    assert module.GIVE_UP_AFTER_S <= 10.0


@pytest.mark.usefixtures("quick")
async def test_a_restored_backup_ends_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions went back: stale specs and phantom services stayed until the operator was restarted."""
    monkeypatch.setattr(module, "GIVE_UP_AFTER_S", 3600.0)
    api = Api()
    lease = _lease(api)
    await lease.acquire()
    assert api.lease is not None
    api.lease["metadata"]["resourceVersion"], api.version = "40", 40
    await asyncio.wait_for(lease.renew(), 60)
    assert not lease.is_held
    await asyncio.wait_for(lease.acquire(), 60)
    assert lease.is_held


@pytest.mark.usefixtures("quick")
async def test_a_busy_event_loop_does_not_lose_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal waited for twenty turns of the loop, each as long as its slowest decision: 14 losses in an hour."""
    monkeypatch.setattr(module, "GIVE_UP_AFTER_S", 2.0)  # a busy machine may hold up the lease's thread for a while
    api = Api()
    lease = _lease(api)
    await lease.acquire()
    keeping = asyncio.create_task(lease.renew())
    await asyncio.sleep(0.05)
    before = api.asked
    time.sleep(2.5)
    assert api.asked > before
    await asyncio.sleep(0)
    assert lease.is_held
    keeping.cancel()
