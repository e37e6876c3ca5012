"""`engine.nodes`: a replica is a group of pods, and all that holds for pods holds for groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator import cluster_model
from outrider_operator.cluster_model import Object
from outrider_operator.decide.desired.rollout_gate import HOLD, HOLD_ANNOTATION, SHRUNK_ANNOTATION

from tests.unit.operator.decide.world import EAGLE, PLD, World, find, gpu_node, manifest, rfc3339, settings_with

NODES: dict[str, Any] = {"engine": {"nodes": 2, "tensorParallelSize": 2}}
NAME = "chat-nodes"
ROLLING = {"maxSurge": 2, "progressDeadline": "20m"}


class Groups(World):
    """A cluster with the controller of LeaderWorkerSets."""

    def groups(self) -> Object:
        return self.objects[cluster_model.LEADER_WORKER_SET, NAME]

    def group_revision(self) -> str:
        labels = self.groups()["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
        return str(labels[cluster_model.REVISION_LABEL])

    def pace(self) -> tuple[int, int, int, int]:
        """replicas, partition, maxSurge and maxUnavailable."""
        spec = self.groups()["spec"]
        limits = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
        return spec["replicas"], limits["partition"], limits["maxSurge"], limits["maxUnavailable"]

    def form(self, *, ready: bool = True, old: int = 0) -> None:
        """What the controller, the scheduler and the kubelets do; `old` groups stay as they are."""
        groups = self.groups()
        spec, count = groups["spec"], groups["spec"]["replicas"]
        surge = spec["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"] if old else 0
        total = count + surge
        for index in range(old, total):
            self._form(index, spec["leaderWorkerTemplate"], ready=ready)
        groups["status"] = {
            "observedGeneration": groups["metadata"]["generation"],
            "replicas": total,
            "updatedReplicas": total - old,
            "readyReplicas": total if ready else old,
            "conditions": [{"type": "Progressing", "status": "True", "lastTransitionTime": rfc3339(self.now)}],
        }

    def _form(self, index: int, template: Object, *, ready: bool) -> None:
        self.states.pop(f"{NAME}-{index}", None)  # a group has the name of the one before it, and pods of its own
        leader = self.add_pod(f"{NAME}-{index}", _in_groups(template["leaderTemplate"]), ready=ready)
        leader["status"]["conditions"][0]["lastTransitionTime"] = rfc3339(self.now)
        for rank in range(1, template["size"]):
            name = f"{NAME}-{index}-{rank}"
            worker = self.add_pod(name, _in_groups(template["workerTemplate"]), ready=ready)
            self.workers[name] = worker
            del self.pods[name]

    def _add_replica_set(self, template: Object) -> None:
        if cluster_model.GROUPS_LABEL not in template["metadata"]["labels"]:
            super()._add_replica_set(template)


def _in_groups(template: Object) -> Object:
    made = copy.deepcopy(template)
    made["metadata"]["labels"][cluster_model.GROUPS_LABEL] = NAME
    return made


def grouped(**spec: Any) -> Groups:
    """Two groups that serve."""
    world = Groups(manifest(**{"replicas": 2, "rollout": ROLLING, **NODES, **spec})).settled()
    world.form()
    world.settle()
    world.report()
    return world


def test_groups_take_the_place_of_the_deployment() -> None:
    world = Groups(manifest(replicas=2, **NODES)).settled()
    assert (cluster_model.DEPLOYMENT, "chat") not in world.objects
    template = world.groups()["spec"]["leaderWorkerTemplate"]
    assert (world.groups()["spec"]["replicas"], template["size"]) == (2, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert world.groups()["metadata"]["ownerReferences"][0]["uid"] == "uid-chat"


def test_groups_without_a_controller_are_named() -> None:
    """The CRD without its controller: the rollout moved for ever, without a reason."""
    world = Groups(manifest(**NODES)).settled()
    assert "is LWS running?" in world.condition(C.PROGRESSING).message
    world.form(ready=False)
    world.settle()
    assert "is LWS running?" not in world.condition(C.PROGRESSING).message


def test_workers_are_behind_no_service() -> None:
    """The Service and the scale selector select leaders: a worker answers no request."""
    world = Groups(manifest(**NODES)).settled()
    template = world.groups()["spec"]["leaderWorkerTemplate"]
    service = world.objects["Service", "chat"]["spec"]["selector"]
    assert service.items() <= template["leaderTemplate"]["metadata"]["labels"].items()
    assert template["workerTemplate"]["metadata"]["labels"][cluster_model.COMPONENT_LABEL] == cluster_model.WORKER
    assert service[cluster_model.COMPONENT_LABEL] != cluster_model.WORKER


def test_a_drain_takes_one_group_at_a_time() -> None:
    """A group goes with any of its pods: a budget of leaders alone let two drains end two groups at once."""
    world = grouped()
    budget = world.objects["PodDisruptionBudget", "chat"]["spec"]
    (rule,) = budget["selector"]["matchExpressions"]
    components = {pod["metadata"]["labels"][rule["key"]] for pod in (*world.pods.values(), *world.workers.values())}
    assert components == set(rule["values"])
    assert budget["maxUnavailable"] == 1


def test_workers_are_leaders_without_what_serves() -> None:
    """A patch of the pod reaches both alike, and no probe asks a worker what only a leader answers."""
    world = Groups(
        manifest(**NODES, podTemplate={"env": [{"name": "NCCL_DEBUG", "value": "INFO"}], "hostname": "a"})
    ).settled()
    template = world.groups()["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]
    assert {**worker, "containers": []} == {**leader, "containers": []}
    (runtime,), (bare,) = leader["containers"], worker["containers"]
    assert {name for name in runtime if name not in bare} == {
        "ports", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe",
    }  # fmt: skip
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in bare["env"]
    assert any(variable["name"] == "VLLM_HOST_IP" for variable in bare["env"])


def test_each_pod_of_a_group_has_its_share_of_the_gpus() -> None:
    spec: dict[str, Any] = {
        "accelerator": {"products": ["NVIDIA-H200"]},
        "engine": {"nodes": 2, "tensorParallelSize": 16},
    }
    world = Groups(manifest(**spec), nodes=(gpu_node("a", "NVIDIA-H200"), gpu_node("b", "NVIDIA-H200"))).settled()
    for template in ("leaderTemplate", "workerTemplate"):
        (runtime,) = world.groups()["spec"]["leaderWorkerTemplate"][template]["spec"]["containers"]
        assert runtime["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_groups_that_serve_are_counted_as_replicas() -> None:
    world = grouped()
    status = world.observed().status
    assert (status.nodes, status.replicas, status.ready_replicas, status.updated_replicas) == (2, 2, 2, 2)
    for kind in (C.READY, C.AVAILABLE, C.UPDATED):
        assert world.condition(kind).status == "True"
    assert world.reason(C.PROGRESSING) == "False/Complete"


def test_a_group_is_not_measured_by_a_job_of_one_pod() -> None:
    world = grouped()
    assert not world.jobs()
    assert world.reason(C.PROFILES_READY) == "False/Learning"
    assert "over several nodes is not measured" in world.condition(C.PROFILES_READY).message


def test_scale_changes_the_number_of_groups() -> None:
    world = grouped()
    world.change(replicas=3)
    assert world.pace() == (3, 0, 2, 0)


@pytest.mark.parametrize(
    ("rollout", "pace"),
    [(ROLLING, (2, 2, 1, 0)), ({"maxSurge": 0, "maxUnavailable": 2}, (2, 1, 0, 1))],
    ids=["surge", "swap"],
)
def test_a_new_revision_stops_at_its_first_group(rollout: dict[str, Any], pace: tuple[int, int, int, int]) -> None:
    """The partition is in the same write as the template: no old group goes before a new one has every drafter."""
    world = grouped(rollout=rollout)
    before = world.pace()
    world.change(draftPool=[PLD, EAGLE])
    assert world.pace() == pace
    assert world.groups()["metadata"]["annotations"][HOLD_ANNOTATION] == HOLD
    old = 2 if rollout is ROLLING else 1
    world.form(old=old)
    world.settle()
    assert world.pace() == pace
    assert world.reason(C.PROGRESSING) == "True/RollingOut"
    world.report()
    assert world.pace() == before
    assert HOLD_ANNOTATION not in world.groups()["metadata"]["annotations"]


def test_a_held_rollout_does_not_grow() -> None:
    """A LeaderWorkerSet makes further groups of its newest template."""
    world = grouped()
    world.change(draftPool=[PLD, EAGLE])
    world.form(old=2)
    world.change(replicas=5)
    assert world.pace()[0] == 2


def test_scaling_down_a_held_swap_keeps_the_last_group() -> None:
    """A scale-down to one group moved the partition to 0: the unproven revision took the place of the last good one."""
    world = grouped(replicas=4, rollout={"maxSurge": 0, "maxUnavailable": 1})
    world.change(draftPool=[PLD, EAGLE])
    assert world.pace() == (4, 3, 0, 1)
    world.form(old=3, ready=False)
    world.change(replicas=1)
    assert world.pace() == (1, 1, 1, 0)
    world.form(old=1)
    world.settle()
    assert world.pace() == (1, 1, 1, 0)
    world.report()
    assert world.pace() == (1, 0, 0, 1)
    assert SHRUNK_ANNOTATION not in world.groups()["metadata"]["annotations"]


def test_a_pause_keeps_every_group_as_it_is() -> None:
    world = grouped()
    world.change(draftPool=[PLD, EAGLE], paused=True)
    assert world.pace() == (2, 2, 0, 1)


def test_a_rollout_of_groups_stalls_after_its_deadline() -> None:
    """A LeaderWorkerSet has no deadline of its own."""
    world = grouped(draftPool=[])
    world.change(engine={**NODES["engine"], "maxModelLen": 2048})
    world.form(old=1, ready=False)
    world.settle()
    assert world.reason(C.PROGRESSING) == "True/RollingOut"
    world.now += 20 * 60 + 1
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert "No progress within rollout.progressDeadline" in world.condition(C.PROGRESSING).message


def test_a_worker_without_a_node_is_named() -> None:
    """The leader waits for it, and says nothing of it."""
    world = Groups(manifest(**NODES)).settled()
    world.form(ready=False)
    (worker,) = world.workers.values()
    scheduled = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available.", "lastTransitionTime": rfc3339(world.now - 120),
    }  # fmt: skip
    worker["status"] = {"phase": "Pending", "conditions": [scheduled]}
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/NoCapacity"
    assert "chat-nodes-0-1" in world.condition(C.PROGRESSING).message


def test_a_crash_that_ends_a_group_is_named() -> None:
    """The controller replaces every pod of a group at the first crash, so none is ever in CrashLoopBackOff."""
    world = Groups(manifest(**NODES)).settled()
    world.form(ready=False)
    leader, (worker,) = world.pods[f"{NAME}-0"], world.workers.values()
    for pod, code, message in ((leader, 1, "outrider-runtime: no such model"), (worker, 143, "")):
        pod["metadata"]["deletionTimestamp"] = rfc3339(world.now)
        ended = {"exitCode": code, "reason": "Error", "message": message}
        pod["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": {"terminated": ended}}
    world.settle()
    assert world.reason(C.AVAILABLE) == "False/PodCrashing"
    said = world.condition(C.AVAILABLE).message
    assert "chat-nodes-0 keeps ending with exit code 1" in said
    assert "no such model" in said


def test_a_cluster_without_leader_worker_sets_is_named() -> None:
    """Everything else goes on: the pods of before serve, follow the scale, and adopt hot fields."""
    world = World(manifest(replicas=2)).served()
    world.groups_access = cluster_model.KindAccess.NOT_INSTALLED
    world.patch(**NODES, replicas=3)
    plan = world.settle()
    assert world.reason(C.SPEC_VALID) == "False/NotInstalled"
    assert "install LWS, or set engine.nodes to 1" in world.condition(C.SPEC_VALID).message
    assert world.reason(C.READY) == "True/EndpointReady"
    assert world.deployment()["spec"]["replicas"] == 3
    assert plan.requeue_after_s is not None
    assert plan.requeue_after_s <= 60
    world.groups_access = cluster_model.KindAccess.SERVED
    world.settle()
    assert (cluster_model.LEADER_WORKER_SET, NAME) in world.objects


def test_pods_serve_until_groups_do() -> None:
    """engine.nodes 1 -> 2 on a live service: one group first, the others once it has every drafter, then the end of
    the Deployment."""
    world = Groups(manifest(replicas=2, profiling={"mode": "Skip"}, rollout=ROLLING)).served()
    world.change(**NODES)
    assert world.pace()[0] == 1
    assert world.deployment()["spec"]["replicas"] == 2
    world.form()
    world.settle()
    world.report()
    assert world.pace() == (2, 0, 2, 0)
    assert (cluster_model.DEPLOYMENT, "chat") in world.objects
    world.form()
    world.report()
    assert (cluster_model.DEPLOYMENT, "chat") not in world.objects
    assert world.observed().status.nodes == 2


def test_groups_serve_until_pods_do() -> None:
    """And back."""
    world = grouped(profiling={"mode": "Skip"})
    world.change(engine={})
    assert world.deployment()["spec"]["replicas"] == 1
    deployment = world.deployment()
    world.add_pod("chat-new", deployment["spec"]["template"])
    counts = {"replicas": 1, "updatedReplicas": 1, "availableReplicas": 0}
    deployment["status"] = {"observedGeneration": deployment["metadata"]["generation"], **counts}
    world.report()
    assert world.deployment()["spec"]["replicas"] == 2
    assert (cluster_model.LEADER_WORKER_SET, NAME) in world.objects
    world.add_pod("chat-newer", deployment["spec"]["template"])
    counts = {"replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}
    deployment["status"] = {"observedGeneration": deployment["metadata"]["generation"], **counts}
    world.report()
    assert (cluster_model.LEADER_WORKER_SET, NAME) not in world.objects


def changing() -> Groups:
    """Two pods serve, and the first group of the kind that shall take their place is not ready."""
    world = Groups(manifest(replicas=2, profiling={"mode": "Skip"}, rollout=ROLLING)).served()
    world.change(**NODES)
    world.form(ready=False)
    world.settle()
    return world


def test_replicas_0_stops_pods_next_to_a_held_group() -> None:
    """The Deployment kept its two pods for good."""
    world = changing()
    world.change(replicas=0)
    assert world.pace()[0] == 0
    assert world.deployment()["spec"]["replicas"] == 0
    world.roll_out()
    world.pods.clear()
    world.form()
    world.settle()
    assert (cluster_model.DEPLOYMENT, "chat") not in world.objects


def test_pods_follow_the_scale_next_to_a_held_group() -> None:
    """An autoscaler's replicas reached neither kind. The pods keep their template."""
    world = changing()
    template = world.deployment()["spec"]["template"]
    world.change(replicas=8)
    assert world.pace()[0] == 1
    assert world.deployment()["spec"]["replicas"] == 8
    assert world.deployment()["spec"]["template"] == template


def test_groups_follow_the_scale_next_to_a_held_pod() -> None:
    world = grouped(profiling={"mode": "Skip"})
    world.change(engine={})
    world.change(replicas=3)
    assert world.deployment()["spec"]["replicas"] == 1
    assert world.pace() == (3, 0, 2, 0)


def test_a_pause_keeps_the_kind_of_the_pods() -> None:
    """Groups were started and the Deployment deleted while Progressing said Paused."""
    world = Groups(manifest(replicas=2, draftPool=[], profiling={"mode": "Skip"}, rollout=ROLLING)).served()
    world.change(**NODES, paused=True)
    assert (cluster_model.LEADER_WORKER_SET, NAME) not in world.objects
    assert world.deployment()["spec"]["replicas"] == 2
    assert world.reason(C.PROGRESSING) == "False/Paused"
    world.change(paused=False)
    assert world.pace()[0] == 2


def test_a_pause_keeps_pods_next_to_ready_groups() -> None:
    world = Groups(manifest(replicas=2, draftPool=[], profiling={"mode": "Skip"}, rollout=ROLLING)).served()
    world.change(**NODES)
    world.change(paused=True)
    world.form()
    world.settle()
    assert (cluster_model.DEPLOYMENT, "chat") in world.objects
    world.change(paused=False)
    world.form()
    world.settle()
    assert (cluster_model.DEPLOYMENT, "chat") not in world.objects


def test_a_foreign_set_of_the_name_is_left_alone() -> None:
    world = Groups(manifest(**NODES))
    metadata = {"name": NAME, "namespace": "default", "uid": "uid-theirs", "labels": {}}
    foreign = {"kind": cluster_model.LEADER_WORKER_SET, "metadata": metadata, "spec": {"replicas": 7}}
    world.objects[cluster_model.LEADER_WORKER_SET, NAME] = copy.deepcopy(foreign)
    world.settle()
    assert world.objects[cluster_model.LEADER_WORKER_SET, NAME] == foreign
    assert world.reason(C.SPEC_VALID) == "False/NameConflict"


@pytest.mark.parametrize(
    ("controller", "reason"),
    [((cluster_model.LEADER_WORKER_SET, NAME), "True/Accepted"), (("SpeculativeService", NAME), "False/NameConflict")],
)
def test_a_foreign_service_of_the_name_is_a_conflict(controller: tuple[str, str], reason: str) -> None:
    """LWS takes any Service of its name for the headless one: no pod had a name, and workers waited for a leader."""
    world = Groups(manifest(**NODES))
    owner = {"kind": controller[0], "name": controller[1], "uid": "uid-theirs", "controller": True}
    metadata = {"name": NAME, "namespace": "default", "uid": "uid-service", "labels": {}, "ownerReferences": [owner]}
    world.objects["Service", NAME] = {"kind": "Service", "metadata": metadata, "spec": {}}
    plan = world.settle()
    assert world.reason(C.SPEC_VALID) == reason
    if reason.startswith("False"):
        assert "Service chat-nodes belongs to SpeculativeService chat-nodes" in world.condition(C.SPEC_VALID).message
        assert (cluster_model.LEADER_WORKER_SET, NAME) not in world.objects
        assert plan.requeue_after_s is not None


def test_pods_of_a_group_reach_each_other_under_the_policy() -> None:
    """Collectives choose their ports freely; nothing but the group's own pods reaches a worker.

    A quota that refused the second policy cut leaders off from their workers: each policy has the rule of its pods.
    """
    peers = ({"podSelector": {"matchLabels": {"app": "outrider"}}},)
    world = Groups(manifest(**NODES), settings=settings_with(admin_port_peers=peers))
    plan = world.reconcile()
    (policy,) = find(plan, cluster_model.NETWORK_POLICY, lambda document: document["metadata"]["name"] == NAME)
    (rule,) = policy["spec"]["ingress"]
    assert policy["spec"]["podSelector"]["matchLabels"][cluster_model.COMPONENT_LABEL] == cluster_model.WORKER
    world.settle()
    leaders = world.objects[cluster_model.NETWORK_POLICY, "chat-admin-port"]["spec"]
    assert rule in leaders["ingress"]
    (members,) = rule["from"][0]["podSelector"]["matchExpressions"]
    assert set(members["values"]) == {
        cluster_model.WORKER,
        leaders["podSelector"]["matchLabels"][cluster_model.COMPONENT_LABEL],
    }
    world.change(engine={})
    world.objects.pop((cluster_model.LEADER_WORKER_SET, NAME))
    world.settle()
    assert (cluster_model.NETWORK_POLICY, NAME) not in world.objects
    assert rule not in world.objects[cluster_model.NETWORK_POLICY, "chat-admin-port"]["spec"]["ingress"]
