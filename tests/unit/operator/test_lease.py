"""The Lease: who holds it, and for how long a renewal may fail."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from outrider_operator import lease as module
from outrider_operator.kinds import Kind
from outrider_operator.kubernetes_api import ApiError, KubernetesApi
from outrider_operator.lease import Lease
from outrider_operator.model import Object


class Api:
    """Holds one Lease; while `away` it answers nothing else than that."""

    def __init__(self) -> None:
        self.away = False
        self.asked = 0
        self._lease: Object | None = None

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        del kind, namespace, name
        self.asked += 1
        if self.away:
            raise ApiError(503, "", "later")
        return self._lease

    async def create(self, document: Object) -> Object:
        self._lease = document
        return document

    replace = create


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RENEW_EVERY_S", 0.0), ("RETRY_EVERY_S", 0.0), ("GIVE_UP_AFTER_S", 0.2)):
        monkeypatch.setattr(module, name, seconds)


@pytest.mark.usefixtures("quick")
async def test_a_renewal_that_fails_for_a_moment_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape in that moment saw no condition of any service, and each alert began its `for:` anew."""
    monkeypatch.setattr(module, "GIVE_UP_AFTER_S", 3600.0)
    api = Api()
    lease = Lease(cast(KubernetesApi, api), "ns", "lease", "me")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    api.away, before = True, api.asked
    while api.asked < before + 3:
        await asyncio.sleep(0)
    assert lease.held
    api.away = False
    await asyncio.sleep(0.05)
    assert lease.held
    keeping.cancel()


@pytest.mark.usefixtures("quick")
async def test_a_lease_that_cannot_be_renewed_is_given_up() -> None:
    """Another operator may hold it by now: this one stops working and answers for nobody."""
    api = Api()
    lease = Lease(cast(KubernetesApi, api), "ns", "lease", "me")
    await lease.acquire()
    api.away = True
    await asyncio.wait_for(lease.keep(), 60)
    assert not lease.held
