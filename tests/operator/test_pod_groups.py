"""Replicas of several pods on a real cluster, with the real controller of LeaderWorkerSets and stand-in pods."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from outrider_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET, POD, SERVICE

from tests.cluster.cluster import Cluster
from tests.operator.client import Client, Service, is_ready, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.leader_worker_sets import LeaderWorkerSets
from tests.operator.manifests import EAGLE, LOOKUP, environment

pytestmark = pytest.mark.cluster

PACE = {"maxSurge": 1, "maxUnavailable": 0, "drainTimeout": "1s", "progressDeadline": "300s"}
COMMON: dict[str, Any] = {"rollout": PACE, "profiling": {"mode": "Skip"}}


def over_nodes(**standin: object) -> dict[str, Any]:
    return {"nodes": 2, "tensorParallelSize": 2, "env": environment(**standin)}


class Groups(Service):
    @property
    def revision(self) -> str:
        template = self.child(LEADER_WORKER_SET, f"{self.name}-nodes")["spec"]["leaderWorkerTemplate"]
        labels: dict[str, str] = template["leaderTemplate"]["metadata"]["labels"]
        return labels["outrider.dev/revision"]

    def workers(self) -> list[dict[str, Any]]:
        pods = self.children(POD, "outrider.dev/component=serving-worker")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def wait_groups(self, count: int) -> None:
        """Counts leaders and workers: a group that is new has no worker yet, and a surge group may have its leader."""
        wait_for(
            f"{count} groups", lambda: [len(self.pods()), len(self.ready_pods()), len(self.workers())] == [count] * 3
        )

    def revisions(self) -> set[str]:
        pods = (*self.pods(), *self.workers())
        return {pod["metadata"]["labels"]["outrider.dev/revision"] for pod in pods}


def as_groups(service: Service) -> Groups:
    return Groups(service.client, service.namespace, service.name)


@pytest.fixture(scope="module")
def early(make: Make) -> Groups:
    """A service that asks for groups before their controller is installed, with pods of before."""
    service = make("early", replicas=2, **COMMON)
    service.wait_updated()
    service.patch({"engine": over_nodes()})
    return as_groups(service)


@pytest.fixture(scope="module")
def controller(
    cluster: Cluster, early: Groups, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Generator[LeaderWorkerSets]:
    early.wait("SpecValid", "False", "NotInstalled")
    with LeaderWorkerSets(cluster, namespace, tmp_path_factory.mktemp("lws")) as running:
        yield running


def test_service_without_the_controller_serves_and_says_so(early: Groups) -> None:
    """A condition with a sentence; everything else goes on."""
    assert "install LWS, or set engine.nodes to 1" in early.wait("SpecValid", "False", "NotInstalled")["message"]
    early.wait("Ready", "True")
    early.patch({"replicas": 1})
    wait_for("one pod", lambda: len(early.pods()) == 1)
    early.patch({"replicas": 2})
    wait_for("two pods", lambda: len(early.ready_pods()) == 2)


def test_groups_take_over_from_pods_that_serve(controller: LeaderWorkerSets, early: Groups, client: Client) -> None:
    """engine.nodes 1 -> 2 on a live service: the Deployment goes when as many groups are ready, and not before. A pod
    that has served and is unready for a moment on a busy machine still counts."""
    del controller
    have_served: set[str] = set()
    least = []

    def is_over() -> bool:
        pods = early.pods()
        have_served.update(uids([pod for pod in pods if is_ready(pod)]))
        least.append(len(have_served & uids(pods)))
        return client.get(DEPLOYMENT, early.namespace, early.name) is None

    early.annotate(touched="1")  # no watch tells of the installation
    wait_for("the Deployment's end", is_over)
    assert min(least) >= 2
    early.wait_updated()
    counts = {"nodes": 2, "replicas": 2, "readyReplicas": 2, "updatedReplicas": 2}
    wait_for("the surge group's end in the status", lambda: counts.items() <= early.read()["status"].items())
    early.wait_groups(2)  # the surge group's worker goes after its leader


@pytest.fixture(scope="module")
def groups(controller: LeaderWorkerSets, make: Make) -> Groups:
    del controller
    service = as_groups(make("groups", replicas=2, engine=over_nodes(unloadable="eagle"), **COMMON))
    service.wait_updated()
    return service


def test_endpoints_are_leaders_alone(groups: Groups) -> None:
    """A request that reaches a worker has no answer."""
    groups.wait_groups(2)

    def targets() -> set[str]:
        slices = groups.client._send("GET", f"/apis/discovery.k8s.io/v1/namespaces/{groups.namespace}/endpointslices")
        mine = [s for s in slices["items"] if s["metadata"]["labels"]["kubernetes.io/service-name"] == groups.name]
        return {endpoint["targetRef"]["name"] for s in mine for endpoint in s["endpoints"] or ()}

    wait_for("the leaders", lambda: len(targets()) >= 2)
    assert targets() == {pod["metadata"]["name"] for pod in groups.pods()} == {"groups-nodes-0", "groups-nodes-1"}


def test_pods_of_a_group_know_their_place(groups: Groups) -> None:
    """What vLLM's ranks meet by; the controller's webhook sets it."""
    (worker,) = [pod for pod in groups.workers() if pod["metadata"]["name"] == "groups-nodes-1-1"]
    variables = {entry["name"]: entry.get("value") for entry in worker["spec"]["containers"][0]["env"]}
    assert variables["LWS_LEADER_ADDRESS"] == f"groups-nodes-1.groups-nodes.{groups.namespace}"
    assert (variables["LWS_WORKER_INDEX"], variables["LWS_GROUP_SIZE"]) == ("1", "2")


def test_scale_subresource_scales_groups(groups: Groups, client: Client) -> None:
    client.patch(SERVICE, groups.namespace, groups.name, {"spec": {"replicas": 3}}, "scale")
    groups.wait_groups(3)
    client.patch(SERVICE, groups.namespace, groups.name, {"spec": {"replicas": 2}}, "scale")
    groups.wait_groups(2)
    groups.wait_updated()


def test_a_killed_worker_takes_its_group_along(groups: Groups, client: Client) -> None:
    """Its ranks are gone: the group is made again, leader included, and the other group stays."""
    groups.wait_groups(2)
    groups.wait_updated()
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in groups.pods()}
    client.delete(POD, groups.namespace, "groups-nodes-0-1")

    def is_made_again() -> bool:
        after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in groups.ready_pods()}
        return len(after) == 2 and after["groups-nodes-0"] != before["groups-nodes-0"]

    wait_for("the group", is_made_again)
    groups.wait_groups(2)
    after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in groups.pods()}
    assert after["groups-nodes-1"] == before["groups-nodes-1"]
    groups.wait_updated()


def test_a_template_is_rolled_out_by_group(groups: Groups) -> None:
    groups.wait_updated()
    old, before = uids(groups.pods()), groups.revision
    groups.patch({"engine": {"maxModelLen": 4096}})
    groups.wait_updated()
    assert groups.revision != before
    wait_for("one revision", lambda: groups.revisions() == {groups.revision})
    groups.wait_groups(2)
    assert not uids(groups.pods()) & old


def test_a_missing_draft_stops_at_the_first_group(groups: Groups) -> None:
    """The partition keeps the old groups, and one that is patched back goes by itself."""
    groups.wait_updated()
    old, before = uids(groups.pods()), groups.revision
    groups.patch({"draftPool": [LOOKUP, EAGLE]})
    said = groups.wait("Progressing", "False", "DrafterNotLoaded")["message"]
    assert "The old pods serve on" in said
    assert old <= uids(groups.ready_pods())
    assert len(groups.ready_pods()) == 3
    groups.patch({"draftPool": [LOOKUP]})
    groups.wait_updated()
    wait_for("the first revision", lambda: groups.revisions() == {before})
    groups.wait_groups(2)
    assert old == uids(groups.pods())


def test_scaling_down_a_held_swap_keeps_an_old_group(groups: Groups) -> None:
    """The unproven revision took the place of the last good group; it is on top of it."""
    groups.wait_updated()
    old = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in groups.ready_pods()}
    groups.patch({"rollout": {**PACE, "maxSurge": 0, "maxUnavailable": 1}, "draftPool": [LOOKUP, EAGLE]})
    groups.wait("Progressing", "False", "DrafterNotLoaded")
    generation = groups.patch({"replicas": 1})["metadata"]["generation"]
    wait_for("the change to be seen", lambda: groups.condition("SpecValid")["observedGeneration"] == generation)

    def is_on_top() -> bool:
        ready = {pod["metadata"]["name"]: pod for pod in groups.ready_pods()}
        labels = ready["groups-nodes-1"]["metadata"]["labels"] if len(ready) == 2 else {}
        return labels.get("outrider.dev/revision") == groups.revision and len(groups.revisions()) == 2

    wait_for("a new group next to an old one", is_on_top)
    assert old["groups-nodes-0"] in uids(groups.ready_pods())
    groups.patch({"rollout": PACE, "draftPool": [LOOKUP], "replicas": 2})
    groups.wait_updated()
    assert old["groups-nodes-0"] in uids(groups.ready_pods())


def test_pods_take_over_from_groups(groups: Groups, client: Client) -> None:
    """engine.nodes 2 -> 1: the LeaderWorkerSet goes with all its pods."""
    groups.patch({"engine": {"nodes": 1, "tensorParallelSize": 1}})
    gone = ("groups", LEADER_WORKER_SET, "groups-nodes")
    wait_for("its end", lambda: client.get(gone[1], groups.namespace, gone[2]) is None)
    wait_for("the workers' end", lambda: not groups.workers())
    Service(client, groups.namespace, groups.name).wait_updated()
    wait_for("the end of groups in the status", lambda: "nodes" not in groups.read()["status"])


def test_groups_go_with_their_service(early: Groups, controller: LeaderWorkerSets, client: Client) -> None:
    del controller
    client.delete(SERVICE, early.namespace, early.name)
    wait_for("garbage collection", lambda: not early.children(POD))
    assert client.get(LEADER_WORKER_SET, early.namespace, "early-nodes") is None
