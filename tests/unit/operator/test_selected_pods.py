"""Pods of other workloads, by the labels that services select them with: one watch for each such service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi, Page
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.cluster_model import Object
from outrider_operator.controller import selected_pods
from outrider_operator.controller.selected_pods import SelectedPods
from outrider_operator.kinds import POD, SERVICE, ResourceKind

from tests.unit.operator.documents import document, owned_by, pod

CHAT, OTHER = Key("ns", "chat"), Key("ns", "other")
PATIENCE_S = 30.0


class Api:
    """Has pods with labels, of which each watch brings those that were there when it began."""

    def __init__(self, *pods: Object) -> None:
        self.pods = pods
        self.selectors: list[str] = []

    async def pages(self, kind: ResourceKind, namespace: str | None, selector: str) -> AsyncIterator[Page]:
        assert (kind, namespace) == (POD, "ns")
        self.selectors.append(selector)
        labels = dict(pair.split("=") for pair in selector.split(","))
        yield Page([it for it in self.pods if labels.items() <= it["metadata"]["labels"].items()], "9")

    async def watch(self, *_: object) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield


def service(key: Key, version: int = 1, **labels: str) -> Object:
    workload = {"existing": {"podSelector": {"matchLabels": labels}, "port": 8200, "scheme": "HTTPS"}}
    return document(key.name, version, uid=key.name, spec={"workload": workload} if labels else {})


def labelled(name: str, **labels: str) -> Object:
    made = pod(name, 2, service=None)
    made["metadata"] |= {"labels": labels, "ownerReferences": owned_by("ReplicaSet", "theirs")}
    return made


@asynccontextmanager
async def following(selected: SelectedPods) -> AsyncIterator[None]:
    running = asyncio.create_task(selected.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def until_known(selected: SelectedPods, *keys: Key) -> None:
    while not all(map(selected.knows, keys)):
        await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_pods, "_LOOK_EVERY_S", 0.001)


async def test_selected_pods_are_polled_where_they_serve() -> None:
    cache, heard = ObjectCache(), list[Key]()
    api = Api(labelled("llama-a", app="llama", tier="x"), labelled("web", app="web"))
    selected = SelectedPods(cast(KubernetesApi, api), cache, heard.append)
    pods = ServingPods(cache, selected)
    cache.seen(SERVICE, service(CHAT, app="llama", tier="x"))
    assert not selected.knows(CHAT)
    async with following(selected):
        await until_known(selected, CHAT)
        (serving,) = pods.of(CHAT)
        assert (serving.name, serving.state_url) == ("llama-a", "https://127.0.0.1:8200/outrider/state")
        assert pods.services() == [CHAT]
    assert (api.selectors, set(heard)) == (["app=llama,tier=x"], {CHAT})


async def test_new_leader_waits_for_the_pods_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first look at a service would report that no pod is there, or that none has answered."""
    cache, api = ObjectCache(), Api(labelled("a", app="a"))
    selected = SelectedPods(cast(KubernetesApi, api), cache, lambda _: None)
    cache.seen(SERVICE, service(CHAT, app="a"))
    async with following(selected):
        await selected.listed()
        assert [it["metadata"]["name"] for it in selected.of(CHAT)] == ["a"]
    monkeypatch.setattr(selected_pods, "_FIRST_LIST_S", 0.01)
    await asyncio.wait_for(SelectedPods(cast(KubernetesApi, api), cache, lambda _: None).listed(), PATIENCE_S)


async def test_changed_selector_forgets_the_pods_of_the_former() -> None:
    cache = ObjectCache()
    selected = SelectedPods(
        cast(KubernetesApi, Api(labelled("a", app="a"), labelled("b", app="b"))), cache, lambda _: None
    )
    cache.seen(SERVICE, service(CHAT, app="a"))
    async with following(selected):
        await until_known(selected, CHAT)
        cache.seen(SERVICE, service(CHAT, 2, app="b"))
        assert not selected.knows(CHAT)
        await until_known(selected, CHAT)
        assert [it["metadata"]["name"] for it in selected.of(CHAT)] == ["b"]
        cache.seen(SERVICE, service(CHAT, 3))
        while selected.of(CHAT):
            await asyncio.sleep(0.001)
        assert selected.knows(CHAT)


async def test_pod_of_two_selections_has_rivals_and_wakes_both() -> None:
    cache, heard = ObjectCache(), list[Key]()
    selected = SelectedPods(cast(KubernetesApi, Api(labelled("a", app="a", tier="x"))), cache, heard.append)
    cache.seen(SERVICE, service(CHAT, app="a"))
    async with following(selected):
        await until_known(selected, CHAT)
        assert selected.rivals(CHAT) == {}
        heard.clear()
        cache.seen(SERVICE, service(OTHER, tier="x"))
        await until_known(selected, OTHER)
        assert (selected.rivals(CHAT), selected.rivals(OTHER)) == ({"a": "other"}, {"a": "chat"})
        assert set(heard) == {CHAT, OTHER}
        heard.clear()
        cache.gone(SERVICE, service(OTHER, tier="x"))
        while selected.rivals(CHAT):
            await asyncio.sleep(0.001)
        assert set(heard) == {CHAT, OTHER}


async def test_pod_that_outrider_made_has_its_service_as_rival() -> None:
    cache = ObjectCache()
    made = labelled("a", app="a", **{"outrider.dev/service": "own", "app.kubernetes.io/managed-by": "outrider"})
    selected = SelectedPods(cast(KubernetesApi, Api(made)), cache, lambda _: None)
    cache.seen(SERVICE, service(CHAT, app="a"))
    async with following(selected):
        await until_known(selected, CHAT)
        assert selected.rivals(CHAT) == {"a": "own"}
