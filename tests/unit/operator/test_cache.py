"""The cache: what wakes a service, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_operator.cache import Cache, trim
from outrider_operator.kinds import DEPLOYMENT, NODE, POD, SERVICE, Kind

Told = list[tuple[str, str]]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def cache(told: Told) -> Cache:
    cache = Cache()
    cache.subscribe(lambda kind, document: told.append((kind.kind, document["metadata"]["name"])))
    return cache


def test_a_status_write_of_its_own_wakes_nobody(cache: Cache, told: Told) -> None:
    """Otherwise every write would be followed by a reconcile, and each reconcile might write."""
    cache.seen(SERVICE, _document("chat", 1, status={"replicas": 0}))
    cache.seen(SERVICE, _document("chat", 2, status={"replicas": 1}))
    assert told == [(SERVICE.kind, "chat")]
    kept = cache.get(SERVICE, "ns", "chat")
    assert kept is not None
    assert kept["status"] == {"replicas": 1}


def test_a_childs_status_wakes_its_service(cache: Cache, told: Told) -> None:
    cache.seen(DEPLOYMENT, _document("chat", 1, status={"replicas": 0}))
    cache.seen(DEPLOYMENT, _document("chat", 2, status={"replicas": 1}))
    assert len(told) == 2


def test_the_watch_brings_back_no_older_state(cache: Cache, told: Told) -> None:
    """The answer to a write is newer than what the watch still has to deliver."""
    cache.wrote(DEPLOYMENT, _document("chat", 7, spec={"replicas": 3}))
    cache.seen(DEPLOYMENT, _document("chat", 5, spec={"replicas": 1}))
    kept = cache.get(DEPLOYMENT, "ns", "chat")
    assert kept is not None
    assert kept["spec"] == {"replicas": 3}
    assert told == []


def test_a_relist_drops_what_went_unseen(cache: Cache, told: Told) -> None:
    """A deletion while the watch was broken; objects of other namespaces are not in this list."""
    for name, namespace in (("gone", "ns"), ("kept", "ns"), ("elsewhere", "other")):
        cache.seen(DEPLOYMENT, _document(name, 1, namespace=namespace))
    told.clear()
    cache.relisted(DEPLOYMENT, "ns", [_document("kept", 1)])
    assert told == [(DEPLOYMENT.kind, "gone")]
    assert {document["metadata"]["name"] for document in cache.all(DEPLOYMENT)} == {"kept", "elsewhere"}


def test_the_end_of_an_old_object_is_not_that_of_its_successor(cache: Cache) -> None:
    """Deleted and made anew under the same name: the late news of the first must not remove the second."""
    cache.seen(POD, _document("pod", 1, uid="first"))
    cache.seen(POD, _document("pod", 3, uid="second"))
    cache.gone(POD, _document("pod", 2, uid="first"))
    assert cache.get(POD, "ns", "pod") is not None


@pytest.mark.parametrize("kind", [POD, NODE, DEPLOYMENT])
def test_managed_fields_are_not_kept(kind: Kind) -> None:
    """They are half of an object's size, and no decision reads them."""
    document = _document("any", 1, spec={})
    document["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    assert "managedFields" not in trim(kind, document)["metadata"]


def test_a_nodes_heartbeat_wakes_nobody(cache: Cache, told: Told) -> None:
    """Kubelets report every few minutes; on a large cluster that would be a storm."""
    cache.seen(NODE, _node("node", 1, heartbeat="12:00"))
    cache.seen(NODE, _node("node", 2, heartbeat="12:05"))
    assert len(told) == 1


def _document(name: str, version: int, namespace: str = "ns", uid: str = "uid", **body: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)},
        **body,
    }


def _node(name: str, version: int, heartbeat: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": heartbeat}
    return _document(
        name, version, namespace="", spec={}, status={"conditions": [condition], "images": [{"names": ["x"]}]}
    )
