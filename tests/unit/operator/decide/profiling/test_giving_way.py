"""Where a profiling Job finds a node, and to whom it gives way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider_crds.status import ConditionType as C

from tests.unit.operator.decide.world import CPU_NODE, World, gpu_node, manifest, started, unschedulable


def test_a_job_gives_way_to_a_serving_pod_and_starts_again_after_it() -> None:
    """While a serving pod waits for the same accelerator the Job is deleted, and not made again."""
    world = started(accelerator={"products": ["NVIDIA-L4"]}, nodes=(gpu_node("a", "NVIDIA-L4", 1),))
    assert len(world.jobs()) == 1
    unschedulable(world, "surge", world.now)
    plan = world.settle()
    assert world.jobs() == []
    assert plan.requeue_after_s == pytest.approx(5), "another service's pod wakes nobody here"
    assert world.reason(C.PROFILES_READY) == "False/WaitingForServingPod"
    world.pods["surge"]["spec"]["nodeName"] = "a"
    world.settle()
    assert len(world.jobs()) == 1


def test_a_job_that_finds_no_room_means_learning() -> None:
    """All GPUs may be taken by those who serve: that is no failure, however long it lasts."""
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


def test_on_cpu_the_serving_pod_starts_before_its_hardware_is_measured() -> None:
    """They share the cores: the pod is ready sooner, and the Job measures the model, not the other's start."""
    world = World(manifest())
    world.settle()
    world.roll_out(ready=False)
    world.settle()
    assert world.jobs() == []
    assert world.reason(C.PROFILES_READY) == "False/WaitingForServingPod"
    world.roll_out()
    world.settle()
    assert len(world.jobs()) == 1


def test_a_new_draft_is_measured_after_the_new_pods_have_their_turn() -> None:
    """Seen by the operator before the first pod of the new revision is made: the old ones are not meant."""
    world = World(manifest())
    world.serve()
    world.patch(engine={"maxModelLen": 512})
    world.settle()
    deployment = world.deployment()
    deployment["status"] |= {"observedGeneration": deployment["metadata"]["generation"], "updatedReplicas": 0}
    world.settle()
    assert world.jobs() == []
    world.roll_out()
    world.settle()
    assert len(world.jobs()) == 1


def test_a_pod_that_cannot_start_does_not_keep_its_hardware_from_being_measured() -> None:
    """Its volumes are not there: it uses no core, and the Job may well say the same."""
    world = World(manifest())
    world.settle()
    world.roll_out(ready=False)
    (pod,) = world.pods.values()
    pod["status"] = {"phase": "Pending", "containerStatuses": []}
    world.pod_warnings = {pod["metadata"]["name"]: "FailedMount: no such folder"}
    world.now += 30
    world.settle()
    assert len(world.jobs()) == 1


def test_a_pod_that_never_starts_does_not_keep_its_hardware_from_being_measured() -> None:
    """At most for rollout.progressDeadline."""
    world = World(manifest(rollout={"progressDeadline": "5m"}))
    world.settle()
    world.roll_out(ready=False)
    world.now += 300
    world.settle()
    assert len(world.jobs()) == 1


@pytest.mark.parametrize("problem", ["selector", "resources", "taint"])
def test_a_pod_that_no_node_could_ever_take_does_not_stop_profiling(problem: str) -> None:
    """A wrong nodeSelector, or more memory than any node has, must not keep Jobs away for ever."""
    world = started()
    pod = unschedulable(world, "lost", world.now)["spec"]
    if problem == "selector":
        pod["nodeSelector"] = {"zone": "nowhere"}
    elif problem == "resources":
        pod["containers"][0]["resources"] = {"requests": {"memory": "1Ti"}}
    else:
        world.nodes = (replace(CPU_NODE, taints=({"key": "gpu", "effect": "NoSchedule"},)),)
    world.settle()
    assert len(world.jobs()) == 1


def test_without_a_node_of_the_product_there_is_a_deployment_and_a_sentence_but_no_job() -> None:
    """Node autoscalers need the pending pod; the condition only informs."""
    world = started(accelerator={"products": ["NVIDIA-H200"]}, nodes=(CPU_NODE,))
    assert world.deployment()
    assert world.jobs() == []
    found = world.condition(C.PROFILES_READY)
    assert found.reason == "NoMatchingNode"
    assert "nvidia.com/gpu.product=NVIDIA-H200" in found.message


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


def test_a_node_with_too_few_gpus_does_not_count() -> None:
    """A pod of four GPUs never fits a node of two."""
    four = {"accelerator": {"products": ["NVIDIA-L4"], "count": 4}, "engine": {"tensorParallelSize": 4}}
    assert started(**four, nodes=(gpu_node("a", "NVIDIA-L4", 2),)).reason(C.PROFILES_READY) == "False/NoMatchingNode"
    assert started(**four, nodes=(gpu_node("a", "NVIDIA-L4", 4),)).reason(C.PROFILES_READY) == "False/Profiling"
