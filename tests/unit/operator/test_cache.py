"""The cache: what wakes a service, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_operator.cluster.cache import ObjectCache
from outrider_operator.cluster_model import SERVICE_LABEL
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, NODE, SERVICE
from outrider_operator.validation.reading import name_of

from tests.unit.operator.documents import document, labels

Woken = list[tuple[str, str]]


@pytest.fixture
def woken() -> Woken:
    return []


@pytest.fixture
def cache(woken: Woken) -> ObjectCache:
    cache = ObjectCache()
    cache.subscribe(lambda kind, document: woken.append((kind.kind, document["metadata"]["name"])))
    return cache


def test_its_own_status_write_wakes_no_service(cache: ObjectCache, woken: Woken) -> None:
    """Otherwise every write would be followed by a reconcile, and each reconcile might write."""
    cache.seen(SERVICE, document("chat", 1, status={"replicas": 0}))
    cache.seen(SERVICE, document("chat", 2, status={"replicas": 1}))
    assert woken == [(SERVICE.kind, "chat")]
    kept = cache.get(SERVICE, "ns", "chat")
    assert kept is not None
    assert kept["status"] == {"replicas": 1}


def test_a_childs_status_wakes_its_service(cache: ObjectCache, woken: Woken) -> None:
    cache.seen(DEPLOYMENT, document("chat", 1, status={"replicas": 0}))
    cache.seen(DEPLOYMENT, document("chat", 2, status={"replicas": 1}))
    assert len(woken) == 2


def test_a_relist_drops_what_went_unseen(cache: ObjectCache, woken: Woken) -> None:
    """A deletion while the watch was broken; objects of other namespaces are not in this list."""
    for name, namespace in (("gone", "ns"), ("kept", "ns"), ("elsewhere", "other")):
        cache.seen(DEPLOYMENT, document(name, 1, namespace=namespace))
    woken.clear()
    cache.listed(DEPLOYMENT, "ns", {("ns", "kept")}, 5)
    assert woken == [(DEPLOYMENT.kind, "gone")]
    assert {document["metadata"]["name"] for document in cache.all(DEPLOYMENT)} == {"kept", "elsewhere"}


def test_a_services_objects_are_found_without_a_scan(cache: ObjectCache) -> None:
    """Lookups by namespace and label. An object whose label changes is found only under the new one."""
    cache.seen(CONFIG_MAP, document("chat", 1))
    cache.seen(CONFIG_MAP, document("other", 1, namespace="elsewhere", uid="other"))
    assert [child["metadata"]["name"] for child in cache.labelled(CONFIG_MAP, "ns", SERVICE_LABEL, "chat")] == ["chat"]
    moved = document("chat", 2)
    moved["metadata"]["labels"] = labels("mail")
    cache.seen(CONFIG_MAP, moved)
    assert cache.labelled(CONFIG_MAP, "ns", SERVICE_LABEL, "chat") == ()
    assert len(cache.labelled(CONFIG_MAP, "ns", SERVICE_LABEL, "mail")) == 1


def test_what_carries_no_owner_of_outriders_is_not_kept(cache: ObjectCache, woken: Woken) -> None:
    """600 foreign ConfigMaps of 900 kB with the operator's label ended it for all services."""
    foreign = document("foreign", 1, data={"blob": "x" * 900_000})
    foreign["metadata"]["ownerReferences"] = []
    cache.seen(CONFIG_MAP, foreign)
    assert cache.count(CONFIG_MAP) == 0
    assert woken == []


def test_contents_that_were_read_stay_until_the_object_changes(cache: ObjectCache, woken: Woken) -> None:
    """Watches report metadata: what a decision read must neither be read again for each look nor outlive a change."""
    cache.seen(CONFIG_MAP, _metadata_of("profile", 3))
    assert woken == [(CONFIG_MAP.kind, "profile")]
    cache.completed(CONFIG_MAP, document("profile", 3, data={"target.json": "{}"}))
    assert len(woken) == 1, "who asked for it wakes nobody"
    cache.seen(CONFIG_MAP, _metadata_of("profile", 3))
    assert _kept(cache)["data"] == {"target.json": "{}"}
    cache.seen(CONFIG_MAP, _metadata_of("profile", 4))
    assert "data" not in _kept(cache)
    assert len(woken) == 2


def test_contents_that_are_newer_than_the_watch_are_news(cache: ObjectCache, woken: Woken) -> None:
    """Others share the profile, and the watch will not repeat what is known."""
    cache.seen(CONFIG_MAP, _metadata_of("profile", 3))
    cache.completed(CONFIG_MAP, document("profile", 4, data={"target.json": "{}"}))
    assert len(woken) == 2
    cache.completed(CONFIG_MAP, document("profile", 3, data={}))
    assert _kept(cache)["data"] == {"target.json": "{}"}


def test_objects_beyond_any_number_are_kept_and_come_back(cache: ObjectCache) -> None:
    """Those beyond a limit were refused, and stayed invisible when others were deleted: of 90 profiles 60 were seen."""
    profiles = [document(f"shared-{number}", number + 1, uid=str(number)) for number in range(130)]
    for profile in profiles:
        cache.seen(CONFIG_MAP, profile)
    for profile in profiles[:40]:
        cache.gone(CONFIG_MAP, profile)
    for profile in profiles[40:]:
        cache.seen(CONFIG_MAP, profile)
    cache.listed(CONFIG_MAP, None, {("ns", name_of(profile)) for profile in profiles[40:]}, 200)
    assert cache.count(CONFIG_MAP) == 90


def test_an_object_that_loses_its_owner_goes(cache: ObjectCache, woken: Woken) -> None:
    cache.seen(DEPLOYMENT, document("chat", 1))
    orphan = document("chat", 2)
    orphan["metadata"]["ownerReferences"] = []
    cache.seen(DEPLOYMENT, orphan)
    assert cache.get(DEPLOYMENT, "ns", "chat") is None
    assert woken == [(DEPLOYMENT.kind, "chat")] * 2


@pytest.mark.parametrize(
    "news",
    [{"heartbeat": "12:05"}, {"ready": "False"}, {"unschedulable": True}],
    ids=["heartbeat", "ready", "cordoned"],
)
def test_node_field_that_no_decision_reads_wakes_no_service(
    cache: ObjectCache, woken: Woken, news: dict[str, Any]
) -> None:
    """Kubelets report every few minutes; on a large cluster that would be a storm."""
    cache.seen(NODE, _node("node", 1))
    cache.seen(NODE, _node("node", 2, **news))
    assert len(woken) == 1


def test_a_cleared_cache_takes_versions_of_a_restored_backup() -> None:
    """Versions only grew, so that stale specs and services of the future stayed until a restart."""
    cache, news = ObjectCache(), list[str]()
    cache.subscribe(lambda _, changed: news.append(name_of(changed)))
    cache.seen(SERVICE, document("chat", 900))
    cache.listed(SERVICE, None, {("ns", "chat")}, 950)
    cache.gone(SERVICE, document("old", 800))
    cache.clear()
    assert cache.count(SERVICE) == 0
    assert news == ["chat", "chat"], "what went is looked at"
    for name in ("chat", "old"):
        cache.seen(SERVICE, document(name, 40))
        assert cache.get(SERVICE, "ns", name) is not None


def _metadata_of(name: str, version: int) -> dict[str, Any]:
    return document(name, version) | {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}


def _kept(cache: ObjectCache) -> dict[str, Any]:
    profile = cache.get(CONFIG_MAP, "ns", "profile")
    assert profile is not None
    assert profile["kind"] == CONFIG_MAP.kind
    return profile


def _node(
    name: str, version: int, heartbeat: str = "12:00", ready: str = "True", unschedulable: bool = False
) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}
    status = {"conditions": [condition], "images": [{"names": ["x"]}]}
    return document(name, version, namespace="", spec={"unschedulable": unschedulable}, status=status)
