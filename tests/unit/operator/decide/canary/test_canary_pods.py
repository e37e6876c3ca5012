"""A canary's pods next to the others: traffic, disruption budget, room, products."""

from __future__ import annotations

from outrider_operator.model import SERVICE_LABEL

from tests.unit.operator.decide.canary.canary_world import CANARY, GAIN, LOSS, NAME, CanaryWorld, under_way
from tests.unit.operator.decide.world import EAGLE, PLD, gpu_node


def test_its_pods_get_traffic_and_are_no_replicas() -> None:
    world = under_way()
    assert world.canary is not None
    template, service = world.canary["spec"]["template"], world.objects["Service", "chat"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert labels["outrider.dev/track"] == "canary"
    budget = world.objects["PodDisruptionBudget", "chat"]["spec"]["selector"]["matchLabels"]
    assert budget.items() <= labels.items()
    assert world.observed().status.replicas == 2
    assert world.observed().status.ready_replicas == 2
    hot = next(v for v in template["spec"]["volumes"] if v["name"].endswith("hot"))
    assert hot["configMap"]["name"] == f"{NAME}-hot"


def test_a_canary_pod_that_is_not_ready_blocks_no_drain() -> None:
    """Bug avoided: its disruption budget counts the pod, and one that crashes for hours would use up what may go."""
    world = CanaryWorld()
    budget = world.objects["PodDisruptionBudget", "chat"]["spec"]
    world.patch(draftPool=[PLD, EAGLE])
    world.settle()
    assert budget["maxUnavailable"] == 1
    world.start_canary(ready=False)
    world.settle()
    assert world.objects["PodDisruptionBudget", "chat"]["spec"]["maxUnavailable"] == 2
    world.start_canary()
    world.settle()
    assert world.objects["PodDisruptionBudget", "chat"]["spec"]["maxUnavailable"] == 1


def test_where_no_pod_may_be_added_one_makes_room_but_never_the_last() -> None:
    rollout = {**CANARY, "maxSurge": 0, "maxUnavailable": 1}
    world = under_way(rollout=rollout)
    assert world.deployment()["spec"]["replicas"] == 1
    single = under_way(rollout=rollout, replicas=1)
    assert single.deployment()["spec"]["replicas"] == 1


def test_each_product_in_use_has_its_pod_and_none_may_lose() -> None:
    nodes = (gpu_node("a", "H200"), gpu_node("b", "L4"))
    world = CanaryWorld(nodes, accelerator={"products": ["H200", "L4", "A100"]})
    for pod, node in zip(world.pods.values(), nodes, strict=True):
        pod["spec"]["nodeName"] = node.name
        pod["metadata"]["annotations"]["outrider.dev/product"] = node.labels["nvidia.com/gpu.product"]
    world.patched()
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 2
    (spread,) = world.canary["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["labelSelector"]["matchLabels"][SERVICE_LABEL]) == (
        "nvidia.com/gpu.product",
        "chat",
    )
    world.measure_arms(1000, GAIN, product="H200")
    assert [(entry.product, entry.measured) for entry in world.rollout.products] == [
        ("H200", True),
        ("L4", False),
        ("A100", False),
    ]
    world.measure_arms(1000, LOSS, pod=f"{NAME}-1", product="L4")
    assert (world.phase, world.rollout.cause) == ("Failed", "Worse")
