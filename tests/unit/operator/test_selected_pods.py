"""Pods of other workloads, by the labels that services select them with: one watch for each selector."""

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
    """Has pods with labels. Each watch brings those that were there when it began, and the changes."""

    def __init__(self, *pods: Object) -> None:
        self.pods = pods
        self.selectors: list[str] = []
        self._changes: list[asyncio.Queue[tuple[str, Object]]] = []

    async def pages(self, kind: ResourceKind, namespace: str | None, selector: str) -> AsyncIterator[Page]:
        assert (kind, namespace) == (POD, "ns")
        self.selectors.append(selector)
        labels = dict(pair.split("=") for pair in selector.split(","))
        yield Page([it for it in self.pods if labels.items() <= it["metadata"]["labels"].items()], "9")

    async def watch(self, *_: object) -> AsyncIterator[Any]:
        changes = asyncio.Queue[tuple[str, Object]]()
        self._changes.append(changes)
        while True:
            yield await changes.get()

    def change(self, changed: Object) -> None:
        for changes in self._changes:
            changes.put_nowait(("MODIFIED", changed | {"metadata": changed["metadata"] | {"resourceVersion": "10"}}))


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


async def test_pod_of_two_selections_names_and_wakes_both() -> None:
    cache, heard = ObjectCache(), list[Key]()
    selected = SelectedPods(cast(KubernetesApi, Api(labelled("a", app="a", tier="x"))), cache, heard.append)
    cache.seen(SERVICE, service(CHAT, app="a"))
    async with following(selected):
        await until_known(selected, CHAT)
        assert selected.other_services(CHAT) == {}
        heard.clear()
        cache.seen(SERVICE, service(OTHER, tier="x"))
        await until_known(selected, OTHER)
        assert [selected.other_services(key) for key in (CHAT, OTHER)] == [{"a": "other"}, {"a": "chat"}]
        assert set(heard) == {CHAT, OTHER}
        heard.clear()
        cache.gone(SERVICE, service(OTHER, tier="x"))
        while selected.other_services(CHAT):
            await asyncio.sleep(0.001)
        assert set(heard) == {CHAT, OTHER}


async def test_services_with_one_selector_share_one_watch() -> None:
    """Each held a connection and a copy of the pods: 500 services of 500 pods took 2.5 s of the event loop for a change
    of one pod."""
    cache, heard, api = ObjectCache(), list[Key](), Api(labelled("a", app="a"))
    selected = SelectedPods(cast(KubernetesApi, api), cache, heard.append)
    cache.seen(SERVICE, service(CHAT, app="a"))
    async with following(selected):
        await until_known(selected, CHAT)
        heard.clear()
        cache.seen(SERVICE, service(OTHER, 2, app="a"))
        await until_known(selected, OTHER)
        assert [selected.other_services(key) for key in (CHAT, OTHER)] == [{"a": "other"}, {"a": "chat"}]
        assert (api.selectors, set(heard)) == (["app=a"], {CHAT, OTHER})
        cache.gone(SERVICE, service(CHAT, app="a"))
        while selected.of(CHAT):
            await asyncio.sleep(0.001)
        assert (len(selected.of(OTHER)), selected.other_services(OTHER)) == (1, {})


@pytest.mark.parametrize("label", ["", "{}"], ids=["one selector", "selectors of their own"])
async def test_change_of_pod_wakes_each_of_many_services_once(label: str) -> None:
    """Each of their watches woke all of them: 250,000 times for 500 services."""
    keys = [Key("ns", f"s{number}") for number in range(50)]
    labels = [{f"app{label.format(number)}": "a"} for number in range(50)]
    api = Api(labelled("a", **{name: "a" for selector in labels for name in selector}))
    cache, heard = ObjectCache(), list[Key]()
    selected = SelectedPods(cast(KubernetesApi, api), cache, heard.append)
    for key, selector in zip(keys, labels, strict=True):
        cache.seen(SERVICE, service(key, 1, **selector))
    async with following(selected):
        await until_known(selected, *keys)
        assert all(selected.other_services(key) for key in keys)
        heard.clear()
        api.change(api.pods[0] | {"status": {"phase": "Running"}})
        while set(heard) != set(keys):
            await asyncio.sleep(0.001)
        assert sorted(heard) == sorted(keys)


async def test_pod_that_outrider_made_names_its_service() -> None:
    cache = ObjectCache()
    made = labelled("a", app="a", **{"outrider.dev/service": "own", "app.kubernetes.io/managed-by": "outrider"})
    selected = SelectedPods(cast(KubernetesApi, Api(made)), cache, lambda _: None)
    cache.seen(SERVICE, service(CHAT, app="a"))
    async with following(selected):
        await until_known(selected, CHAT)
        assert selected.other_services(CHAT) == {"a": "own"}
