"""Nodes for profiling Jobs, and reasons why a Job waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import JOB, Node, Object
from outrider_operator.decide import decide
from outrider_operator.decide.pod_spec import placement
from outrider_operator.decide.profiling.product_profiles import MOST_HOSTNAMES

from tests.unit.operator.decide.world import CPU_NODE, World, gpu_node, manifest, settings_with, started, unschedulable


@pytest.mark.parametrize(("product", "node"), [("cpu", CPU_NODE), ("NVIDIA-L4", gpu_node("a", "NVIDIA-L4"))])
@pytest.mark.parametrize("whose", ["its own", "another service's"])
def test_a_serving_pod_without_a_node_keeps_no_job_away(product: str, node: Node, whose: str) -> None:
    """A zone that is not there, a misspelled claim, no room: only the scheduler knows whether a Job's going would help,
    and by the Jobs' priority class it acts on it. The operator neither stops Jobs for such a pod nor holds them up."""
    settings = settings_with(profiling_priority_class="outrider-profiling")
    world = World(manifest(accelerator={"products": [product]}), nodes=(node,), settings=settings).settled()
    world.roll_out()
    pod = unschedulable(world, "lost", world.now)
    if whose != "its own":
        pod["metadata"]["labels"]["outrider.dev/service"] = "another"
    world.settle()
    (job,) = world.jobs()
    assert world.objects[JOB, job]["spec"]["template"]["spec"]["priorityClassName"] == "outrider-profiling"
    world.now += 3600
    world.settle()
    assert world.jobs() == [job]


def test_a_job_is_stopped_only_as_it_was_seen() -> None:
    """Its result may have come meanwhile: then the deletion does not hold, and the result is stored."""
    world = started()
    world.objects[JOB, world.jobs()[0]]["metadata"]["resourceVersion"] = "41"
    world.patch(paused=True)
    (delete,) = world.reconcile().delete
    assert (delete.kind, delete.resource_version) == (JOB, "41")


def test_a_quota_that_forbids_the_jobs_pod_is_named() -> None:
    """The Job is there and its pod is not: its own events alone say why."""
    world = started()
    (job,) = world.jobs()
    world.warnings = {job: f'FailedCreate: Error creating: pods "{job}-x7k2p" is forbidden: exceeded quota: few'}
    plan = world.settle()
    ready = world.condition(C.PROFILES_READY)
    assert (ready.status, ready.reason) == ("False", "Learning")
    assert "exceeded quota: few" in ready.message
    assert "x7k2p" not in ready.message, "the next attempt has another name"
    assert plan.requeue_after_s is not None, "no watch event tells of it"


def test_a_job_that_finds_no_room_means_learning() -> None:
    """Serving pods may use all GPUs: that is no failure, however long it lasts."""
    world = started(accelerator={"products": ["NVIDIA-L4"]}, nodes=(gpu_node("a", "NVIDIA-L4", 1),))
    job = world.jobs()[0]
    pod = unschedulable(world, "job-pod", world.now)
    world.job_pods[job] = world.pods.pop("job-pod")
    pod["metadata"]["labels"] = {"batch.kubernetes.io/job-name": job}
    world.now += 7200
    world.settle()
    assert world.reason(C.PROFILES_READY) == "False/Learning"
    assert "insufficient nvidia.com/gpu" in world.condition(C.PROFILES_READY).message
    assert world.jobs() == [job]


def test_serving_pod_on_cpu_starts_before_measurement() -> None:
    """They share the cores: the pod is ready sooner, and the Job measures the model, not the other's start."""
    world = World(manifest()).settled()
    world.replace_pods(ready=False)
    assert world.jobs() == []
    assert world.reason(C.PROFILES_READY) == "False/WaitingForServingPod"
    world.replace_pods()
    assert len(world.jobs()) == 1


def test_new_draft_is_measured_after_the_new_pods_start() -> None:
    """When the operator looks, no pod of the new revision exists yet; the old revision's pods do not count."""
    world = World(manifest()).served()
    world.change(engine={"maxModelLen": 512})
    deployment = world.deployment()
    deployment["status"] |= {"observedGeneration": deployment["metadata"]["generation"], "updatedReplicas": 0}
    world.settle()
    assert world.jobs() == []
    world.replace_pods()
    assert len(world.jobs()) == 1


@pytest.mark.parametrize(("waits_s", "warning"), [(30, "FailedMount: no such folder"), (300, "")])
def test_pod_that_does_not_start_keeps_no_job_away(waits_s: int, warning: str) -> None:
    """A pod without its volumes uses no core. A Job waits for others at most for rollout.progressDeadline."""
    world = World(manifest(rollout={"progressDeadline": "5m"})).settled()
    world.roll_out(ready=False)
    (pod,) = world.pods.values()
    if warning:
        pod["status"] = {"phase": "Pending", "containerStatuses": []}
        world.warnings = {pod["metadata"]["name"]: warning}
    world.now += waits_s
    world.settle()
    assert len(world.jobs()) == 1


def test_product_without_a_node_has_a_deployment_but_no_job() -> None:
    """Node autoscalers need the pending pod; the condition only informs."""
    world = started(accelerator={"products": ["NVIDIA-H200"]}, nodes=(CPU_NODE,))
    assert world.deployment()
    assert world.jobs() == []
    ready = world.condition(C.PROFILES_READY)
    assert ready.reason == "NoMatchingNode"
    assert "nvidia.com/gpu.product=NVIDIA-H200" in ready.message


@pytest.mark.parametrize(
    ("tolerations", "fits"),
    [
        ([], False),
        ([{"key": "gpu", "operator": "Exists"}], True),
        ([{"operator": "Exists"}], True),
        ([{"key": "gpu", "value": "yes"}], True),
        ([{"key": "gpu", "value": "no"}], False),
        ([{"key": "other", "operator": "Exists"}], False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], False),
    ],
)
def test_a_tainted_node_counts_only_where_the_spec_tolerates_it(tolerations: list[dict[str, str]], fits: bool) -> None:
    """NoMatchingNode is what the scheduler would say."""
    taints = (
        {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
        {"key": "bare", "effect": "NoSchedule"},
        {"key": "soft", "effect": "PreferNoSchedule"},
    )
    node = replace(gpu_node("a", "NVIDIA-L4"), taints=taints)
    tolerations = [*tolerations, {"key": "bare"}]
    world = started(accelerator={"products": ["NVIDIA-L4"], "tolerations": tolerations}, nodes=(node,))
    assert world.reason(C.PROFILES_READY) == ("False/Profiling" if fits else "False/NoMatchingNode")


def test_a_toleration_that_admission_adds_counts() -> None:
    """GKE tolerates the taint of GPU nodes in the pod's stead: no NoMatchingNode while pods serve."""
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    world = World(
        manifest(accelerator={"products": ["NVIDIA-L4"]}),
        nodes=(replace(gpu_node("a", "NVIDIA-L4"), taints=(taint,)),),
    ).settled()
    assert world.reason(C.PROFILES_READY) == "False/NoMatchingNode"
    world.roll_out()
    for pod in world.pods.values():
        pod["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    world.settle()
    assert world.reason(C.PROFILES_READY) == "False/Profiling"
    assert len(world.jobs()) == 1


def test_tolerations_of_many_pods_are_not_held_against_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod has those of its template: 300 pods and 100 tainted nodes took a decision 0.3 s, in one callback."""
    pairs: list[str] = []
    tolerates = placement._tolerates

    def counted(toleration: Object, key: str, value: str, effect: str) -> bool:
        pairs.append(key)
        return tolerates(toleration, key, value, effect)

    monkeypatch.setattr(placement, "_tolerates", counted)
    extra_tolerations = [{"key": f"other-{number}", "operator": "Exists"} for number in range(16)]
    tainted = replace(gpu_node("a", "NVIDIA-L4"), taints=({"key": "gpu", "effect": "NoSchedule"},))
    world = World(
        manifest(accelerator={"products": ["NVIDIA-L4"], "tolerations": extra_tolerations}, replicas=100),
        nodes=(tainted,) * 100,
    ).settled()
    world.roll_out()
    pairs.clear()
    decide(world.observed(), world.settings)
    assert 0 < len(pairs) <= 2 * len(extra_tolerations), "those of the spec, and of one pod"
    monkeypatch.undo()
    assert world.reason(C.PROFILES_READY) == "False/NoMatchingNode"


def test_a_node_with_too_few_gpus_does_not_count() -> None:
    """A pod of four GPUs never fits a node of two."""
    four = {"accelerator": {"products": ["NVIDIA-L4"], "count": 4}, "engine": {"tensorParallelSize": 4}}
    assert started(**four, nodes=(gpu_node("a", "NVIDIA-L4", 2),)).reason(C.PROFILES_READY) == "False/NoMatchingNode"
    assert started(**four, nodes=(gpu_node("a", "NVIDIA-L4", 4),)).reason(C.PROFILES_READY) == "False/Profiling"


FALLBACK: dict[str, Any] = {"accelerator": {"products": ["H200", "H100"]}}


@pytest.mark.parametrize("mode", ["Auto", "Required"])
def test_a_fallback_product_without_a_node_blocks_nothing(mode: str) -> None:
    """ProfilesReady was NoMatchingNode for ever; with Required there was no Deployment, and a Job ordered a node."""
    world = World(manifest(**FALLBACK, profiling={"mode": mode}), nodes=(gpu_node("a", "H100"),)).settled()
    if mode == "Auto":
        world.replace_pods()
    (job,) = world.jobs()
    assert world.created_jobs[0].keys.product == "H100"
    world.profile(job)
    world.replace_pods()
    assert not world.jobs()
    assert world.reason(C.PROFILES_READY) == "True/Profiled"
    assert "No node has H200" in world.condition(C.PROFILES_READY).message
    world.nodes = (gpu_node("a", "H100"), gpu_node("b", "H200"))
    world.settle()
    assert world.created_jobs[-1].keys.product == "H200", "measured once pods may land there"


def test_products_that_no_node_has_are_all_waited_for() -> None:
    """None is a fallback of another yet."""
    world = World(manifest(**FALLBACK), nodes=()).settled()
    assert world.reason(C.PROFILES_READY) == "False/NoMatchingNode"
    for product in ("H200", "H100"):
        assert product in world.condition(C.PROFILES_READY).message


def _with_hostname(name: str, product: str = "H100") -> Node:
    node = gpu_node(name, product)
    return replace(node, labels={**node.labels, "kubernetes.io/hostname": name})


def _hosts(world: World) -> list[str]:
    """Nodes that the Job's pod may run on."""
    (job,) = world.jobs()
    pod = world.objects[JOB, job]["spec"]["template"]["spec"]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    expressions = {expression["key"]: expression["values"] for expression in term["matchExpressions"]}
    assert expressions["nvidia.com/gpu.product"] == ["H100"]
    return list(expressions.get("kubernetes.io/hostname", []))


def _measured_on(mode: str, *names: str) -> World:
    accelerator = {"products": ["H100"]}
    nodes = tuple(map(_with_hostname, names))
    world = World(manifest(accelerator=accelerator, profiling={"mode": mode}), nodes=nodes).settled()
    if mode == "Auto":
        world.replace_pods()
    return world


def test_an_automatic_job_brings_no_node_up() -> None:
    """Karpenter ignores priorities: an 8xH200 node came for a measurement of five minutes."""
    assert _hosts(_measured_on("Auto", "b", "a")) == ["a", "b"]
    assert _hosts(_measured_on("Required", "b", "a")) == []


def test_a_waiting_job_follows_the_nodes_that_come() -> None:
    """A Job of yesterday's nodes would wait for ever, next to a free one."""
    world = _measured_on("Auto", "a")
    world.nodes = (_with_hostname("a"), _with_hostname("b"), _with_hostname("c", "L4"))
    world.now += 700
    world.settle()
    assert _hosts(world) == ["a", "b"]
    (job,) = world.jobs()
    world.objects[JOB, job]["metadata"]["uid"] = "placed"
    world.job_pods[job] = {
        "metadata": {"name": f"{job}-x", "labels": {"batch.kubernetes.io/job-name": job}},
        "spec": {"nodeName": "a"},
        "status": {"phase": "Pending"},
    }
    world.nodes = (_with_hostname("d"),)
    world.settle()
    assert _hosts(world) == ["a", "b"], "one that has its node goes on"


def test_nodes_that_come_and_go_make_no_new_job() -> None:
    """Each of a dozen waiting Jobs was deleted and made again every minute by the work of an autoscaler."""
    world = _measured_on("Auto", "a", "b")
    for names in (("a", "b", "c"), ("b",), ("b", "d")):
        world.nodes = tuple(map(_with_hostname, names))
        world.now += 60
        world.settle()
        assert _hosts(world) == ["a", "b"]
    world.nodes = (_with_hostname("d"),)
    world.settle()
    assert _hosts(world) == ["d"], "of those that it waits for none is left"


def test_a_job_names_a_bounded_number_of_nodes() -> None:
    names = [f"node-{number}" for number in range(200)]
    hosts = _hosts(_measured_on("Auto", *names))
    assert len(hosts) == MOST_HOSTNAMES
    assert hosts == _hosts(_measured_on("Auto", *reversed(names)))
