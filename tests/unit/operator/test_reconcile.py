"""One reconcile, from the cache to the requests that it sends."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from outrider_operator.cluster.api_error import ApiError
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.cluster_model import Observed, OperatorSettings
from outrider_operator.controller.profile_users import ProfileUsers
from outrider_operator.controller.reconcile import PATIENCE, Decide, Reconciler
from outrider_operator.decide import decide
from outrider_operator.kinds import SERVICE
from outrider_operator.plan import Plan
from outrider_operator.service_metrics.measurements import Measurements

from tests.unit.operator.decide.world import manifest
from tests.unit.operator.taking_api import TakingApi

CHAT = Key("ns", "chat")


async def test_new_service_shows_conditions_before_it_has_children() -> None:
    """The median of 300 new services waited 38 s: each got all children before the next showed anything."""
    api = TakingApi()
    reconciler = _reconciler(api)
    assert await reconciler.reconcile(CHAT) == 0.0
    assert api.written == ["status"]
    await reconciler.reconcile(CHAT)
    assert "Deployment" in api.written
    assert api.written.count("status") == 1, "the conditions are the same until a child has a status"


async def test_first_look_at_a_new_service_reads_nothing() -> None:
    """One in twenty of 150 new services waited over 72 s on a busy machine: each read five absent children first."""
    api = TakingApi()
    reconciler = _reconciler(api)
    await reconciler.reconcile(CHAT)
    assert (api.written, api.reads) == (["status"], 0)
    await reconciler.reconcile(CHAT)
    assert api.reads > 0, "children without our labels are known to the API server alone"


async def test_refused_status_does_not_block_children() -> None:
    api = TakingApi(refuses="status")
    reconciler = _reconciler(api)
    for _ in range(2):
        with pytest.raises(ApiError):
            await reconciler.reconcile(CHAT)
    assert "Deployment" in api.written


async def test_an_api_server_that_stays_busy_is_reported() -> None:
    """An answer of 503 to each apply of one kind, for good: no condition said so, and no status was written."""
    api = TakingApi(refuses="Deployment", status=503)
    reconciler = _reconciler(api)
    await reconciler.reconcile(CHAT)
    for _ in range(PATIENCE):
        with pytest.raises(ApiError):
            await reconciler.reconcile(CHAT)
    await reconciler.reconcile(CHAT)
    conditions = {entry["type"]: entry for entry in api.documents["status"]["status"]["conditions"]}
    assert conditions["SpecValid"]["reason"] == "ChildRejected"
    assert "refuses Deployment chat: no" in conditions["SpecValid"]["message"]


async def test_namespace_that_ends_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    """Deleting a namespace with three services logged 33 warnings: each child was made again, and each try refused."""
    api = TakingApi(refuses="ServiceAccount", status=403, causes=frozenset({"NamespaceTerminating"}))
    reconciler = _reconciler(api)
    await reconciler.reconcile(CHAT)
    writes = len(api.written)
    assert await reconciler.reconcile(CHAT) is None
    assert api.written[writes:] == ["ServiceAccount"], "what is refused there is all that is tried"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_turn_of_the_event_loop_has_one_decision() -> None:
    """A thousand services woken at once: with sixteen decisions in a turn, whatever else was urgent came late."""
    turns: list[int] = []
    turn = 0

    def noting(observed: Observed, settings: OperatorSettings) -> Plan:
        turns.append(turn)
        return decide(observed, settings)

    reconciler = _reconciler(TakingApi(), noting)
    await reconciler.reconcile(CHAT)
    turns.clear()
    workers = [asyncio.create_task(reconciler.reconcile(CHAT)) for _ in range(16)]
    while not all(worker.done() for worker in workers):
        turn += 1
        await asyncio.sleep(0)
    assert len(turns) >= 16
    assert max(turns.count(entry) for entry in turns) == 1


def _reconciler(api: Any, decide: Decide = decide) -> Reconciler:
    cache = ObjectCache()
    metadata = {"name": "chat", "namespace": "ns", "uid": "chat", "resourceVersion": "1", "generation": 1}
    cache.seen(SERVICE, {**manifest(), "metadata": metadata})
    pods, client = ServingPods(cache), cast(KubernetesApi, api)
    measurements = Measurements(cache, pods, lambda _: None, None, 60.0)
    settings = OperatorSettings(runtime_image_gpu="gpu", runtime_image_cpu="cpu")
    return Reconciler(client, cache, measurements, ProfileUsers(), settings, decide, lambda _: None)
