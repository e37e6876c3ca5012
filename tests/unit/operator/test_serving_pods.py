"""Serving pods of a service: those that its Deployment created. Labels alone do not count."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_operator.cluster.cache import Key, ObjectCache
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.cluster_model import SERVING, WORKER
from outrider_operator.decide.ownership import selector
from outrider_operator.kinds import DEPLOYMENT, POD, REPLICA_SET, STATEFUL_SET
from outrider_operator.validation.reading import name_of

from tests.unit.operator.documents import deployment, document, labels, owned_by, pod, replica_set, stateful_set

CHAT = Key("ns", "chat")


def test_a_pod_without_a_service_label_is_nobodys(cache: ObjectCache, pods: ServingPods) -> None:
    """`kubectl label pod ... outrider.dev/service-` ended the operator for all services."""
    cache.seen(POD, pod("mine"))
    cache.seen(POD, pod("stray", service=None))
    assert [pod_seen.name for pod_seen in pods.of(CHAT)] == ["mine"]
    cache.seen(POD, pod("mine", 2, service=None))
    assert pods.of(CHAT) == ()


@pytest.mark.parametrize("owner", [None, "their-rs"])
def test_a_foreign_pod_with_the_labels_does_not_count(cache: ObjectCache, pods: ServingPods, owner: str | None) -> None:
    """It counted as ready."""
    cache.seen(POD, pod("foreign", owner=owner))
    assert pods.of(CHAT) == ()
    assert pods.documents(CHAT) == ()


def test_pods_come_before_what_owns_them(cache: ObjectCache) -> None:
    """Watches of two kinds bring their news in any order."""
    pods = ServingPods(cache)
    cache.seen(POD, pod("early"))
    assert pods.of(CHAT) == ()
    cache.seen(REPLICA_SET, replica_set())
    cache.seen(DEPLOYMENT, deployment())
    assert [pod_seen.name for pod_seen in pods.of(CHAT)] == ["early"]


def test_pods_of_an_orphaned_replica_set_stay(cache: ObjectCache, pods: ServingPods) -> None:
    """The Deployment was deleted by hand and its pods kept: the new one adopts them, and they serve meanwhile."""
    cache.seen(POD, pod("mine"))
    orphan = replica_set(version=2)
    orphan["metadata"] |= {"ownerReferences": [], "labels": {**labels("chat"), **selector("chat")}}
    cache.seen(REPLICA_SET, orphan)
    cache.gone(DEPLOYMENT, deployment())
    assert [pod_seen.name for pod_seen in pods.of(CHAT)] == ["mine"]


def test_pods_of_a_replica_set_without_a_deployment_do_not_count(cache: ObjectCache, pods: ServingPods) -> None:
    """Made by hand with the operator's own labels, which any tenant may write: its pods counted as ready."""
    foreign = document("theirs", 1, uid="their-rs", spec={"replicas": 1})
    foreign["metadata"] |= {"ownerReferences": [], "labels": labels("chat")}
    cache.seen(REPLICA_SET, foreign)
    cache.seen(POD, pod("foreign", owner="their-rs"))
    assert pods.of(CHAT) == ()


def test_a_pod_that_got_ready_is_ready_by_any_report(cache: ObjectCache, pods: ServingPods) -> None:
    """The answer to a write of the operator's own did, and the watch reported it too late: it was never polled."""
    cache.seen(POD, pod("mine", 1, ready=False))
    cache.wrote(POD, pod("mine", 3))
    cache.seen(POD, pod("mine", 2))
    cache.seen(POD, pod("mine", 3))
    assert [pod_seen.ready for pod_seen in pods.of(CHAT)] == [True]


def test_a_pod_that_went_is_forgotten(cache: ObjectCache, pods: ServingPods) -> None:
    cache.seen(POD, pod("mine"))
    assert pods.services() == [CHAT]
    cache.gone(POD, pod("mine"))
    assert pods.services() == []


def test_only_an_ip_address_is_polled(cache: ObjectCache, pods: ServingPods) -> None:
    """The address becomes part of a URL."""
    cache.seen(POD, pod("odd", address="10.0.0.1@elsewhere/"))
    cache.seen(POD, pod("six", address="fd00::1"))
    urls = {pod_seen.name: pod_seen.state_url for pod_seen in pods.of(CHAT)}
    assert urls == {"odd": "", "six": "http://[fd00::1]:9000/outrider/state"}


def test_pods_of_a_canary_count_those_of_other_deployments_not(cache: ObjectCache, pods: ServingPods) -> None:
    """Its Deployment is the service's second: the name alone tells it from a tenant's."""
    for name in ("chat-canary", "chat-copy"):
        second = document(name, 1, uid=f"{name}-deployment")
        second["metadata"]["labels"] = labels("chat")
        cache.seen(DEPLOYMENT, second)
        owned = replica_set()
        owned["metadata"] |= {"name": f"{name}-rs", "uid": f"{name}-rs", "labels": labels("chat")}
        owned["metadata"]["ownerReferences"] = owned_by("Deployment", f"{name}-deployment")
        cache.seen(REPLICA_SET, owned)
        cache.seen(POD, pod(f"{name}-0", owner=f"{name}-rs"))
    assert [serving.name for serving in pods.of(CHAT)] == ["chat-canary-0"]


def in_group(name: str, owner: str, component: str = SERVING) -> dict[str, Any]:
    """A pod of a group, as its StatefulSet makes it."""
    made = pod(name, owner=None)
    made["metadata"] |= {"labels": labels("chat", component), "ownerReferences": owned_by("StatefulSet", owner)}
    return made


def test_leaders_of_groups_serve_and_their_workers_do_not(cache: ObjectCache, pods: ServingPods) -> None:
    cache.seen(STATEFUL_SET, stateful_set())
    cache.seen(STATEFUL_SET, stateful_set("chat-nodes-0", owner="Pod"))
    cache.seen(POD, in_group("chat-nodes-0", "chat-nodes-LeaderWorkerSet"))
    cache.seen(POD, in_group("chat-nodes-0-1", "chat-nodes-0-Pod", WORKER))
    assert [made.name for made in pods.of(CHAT)] == ["chat-nodes-0"]
    assert [name_of(worker) for worker in pods.workers(CHAT)] == ["chat-nodes-0-1"]


def test_pods_of_a_stateful_set_made_by_hand_do_not_count(cache: ObjectCache, pods: ServingPods) -> None:
    """Any tenant may write its name and labels. Only the LeaderWorkerSet's controller makes one that it owns."""
    by_hand = stateful_set()
    by_hand["metadata"]["ownerReferences"] = []
    cache.seen(STATEFUL_SET, by_hand)
    cache.seen(POD, in_group("chat-nodes-0", "chat-nodes-LeaderWorkerSet"))
    cache.seen(POD, in_group("chat-nodes-0-1", "chat-nodes-0-Pod", WORKER))
    assert pods.of(CHAT) == ()
    assert pods.workers(CHAT) == ()
