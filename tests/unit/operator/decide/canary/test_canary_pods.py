"""A canary's pods next to the others: traffic, disruption budget, room, products."""

from __future__ import annotations

from typing import Any

from outrider_crds.runtime_state import CanaryState
from outrider_operator.cluster_model import SERVICE_LABEL, Object

from tests.unit.operator.decide.canary.canary_world import CANARY, GAIN, LOSS, NAME, CanaryWorld, arm, under_way
from tests.unit.operator.decide.world import EAGLE, PLD, gpu_node


def test_canary_pods_get_traffic_and_are_no_replicas() -> None:
    """They answer, so they count as ready; they are not what the service scales."""
    world = under_way()
    assert world.canary is not None
    template, service = world.canary["spec"]["template"], world.objects["Service", "chat"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert labels["outrider.dev/track"] == "canary"
    budget = world.objects["PodDisruptionBudget", "chat"]["spec"]["selector"]["matchLabels"]
    assert budget.items() <= labels.items()
    assert world.observed().status.replicas == 2
    assert world.observed().status.ready_replicas == 3
    hot = next(v for v in template["spec"]["volumes"] if v["name"].endswith("hot"))
    assert hot["configMap"]["name"] == f"{NAME}-hot"


def test_a_canary_pod_that_is_not_ready_blocks_no_drain() -> None:
    """Bug avoided: its disruption budget counts the pod, and one that crashes for hours would use up what may go."""
    world = CanaryWorld()
    budget = world.objects["PodDisruptionBudget", "chat"]["spec"]
    world.change(draftPool=[PLD, EAGLE])
    assert budget["maxUnavailable"] == 1
    world.start_canary(ready=False)
    world.settle()
    assert world.objects["PodDisruptionBudget", "chat"]["spec"]["maxUnavailable"] == 2
    world.start_canary()
    world.settle()
    assert world.objects["PodDisruptionBudget", "chat"]["spec"]["maxUnavailable"] == 1


def test_pod_makes_room_for_the_canary_but_never_the_last() -> None:
    rollout = {**CANARY, "maxSurge": 0, "maxUnavailable": 1}
    world = under_way(rollout=rollout)
    assert world.deployment()["spec"]["replicas"] == 1
    single = under_way(rollout=rollout, replicas=1)
    assert single.deployment()["spec"]["replicas"] == 1


def on_products(*products: str, **spec: Any) -> CanaryWorld:
    """A service that may run on H200, L4 and A100, with a pod on each of `products`."""
    nodes = (gpu_node("a", "H200"), gpu_node("b", "L4"))
    world = CanaryWorld(nodes, accelerator={"products": ["H200", "L4", "A100"]}, **spec)
    for pod, product in zip(world.pods.values(), products, strict=True):
        use(pod, product)
    world.patched()
    return world


def use(pod: Object, product: str) -> None:
    pod["spec"]["nodeName"] = {"H200": "a", "L4": "b"}[product]
    pod["metadata"]["annotations"]["outrider.dev/product"] = product


def test_each_product_in_use_has_its_pod_and_none_may_lose() -> None:
    world = on_products("H200", "L4")
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


def test_batch_sizes_are_those_of_the_product_that_gains_least() -> None:
    """Bug: the sizes of all products stood next to the gain of one."""
    world = on_products("H200", "L4")
    for pod, product, rate, steps in ((f"{NAME}-0", "H200", 120.0, [0, 0, 0, 9000]), (f"{NAME}-1", "L4", 110.0, [9])):
        arms = {"stable": arm(1000, 100.0), "candidate": arm(1000, rate).model_copy(update={"batch_steps": steps})}
        world.measure_arms(pod=pod, product=product, canary=CanaryState(id=world.order["id"], **arms))
    assert world.rollout.message.endswith("in batches of 1.")


def test_product_that_gets_its_first_pod_is_measured_too() -> None:
    """Bug: it was not, and the candidate was rolled out there by what it gained on another product."""
    world = on_products("H200", "H200")
    assert world.canary is not None
    assert world.canary["spec"]["replicas"] == 1
    world.measure_arms(50, product="H200")
    use(next(iter(world.pods.values())), "L4")
    world.settle()
    assert world.canary["spec"]["replicas"] == 2
    world.processes += 1
    world.start_canary()
    world.measure_arms(1000, GAIN, product="H200")
    assert (world.phase, world.rollout.requests) == ("Measuring", 1050)
    use(next(iter(world.pods.values())), "H200")
    world.measure_arms(500, pod=f"{NAME}-1", product="L4")
    assert (world.phase, world.canary["spec"]["replicas"]) == ("Measuring", 2)
    world.measure_arms(1000, GAIN, pod=f"{NAME}-1", product="L4")
    assert world.phase == "Promoting"


def test_spread_of_the_users_own_over_products_gives_way() -> None:
    """Bug: Kubernetes takes one constraint of a key and an effect, and refused the canary's Deployment."""
    own = {"maxSkew": 2, "topologyKey": "nvidia.com/gpu.product", "whenUnsatisfiable": "DoNotSchedule"}
    others = [{**own, "whenUnsatisfiable": "ScheduleAnyway"}, {**own, "topologyKey": "kubernetes.io/hostname"}]
    world = on_products("H200", "L4", podTemplate={"topologySpreadConstraints": [own, *others]})
    assert world.canary is not None
    spreads = world.canary["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spreads[:2], [spread["maxSkew"] for spread in spreads]) == (others, [2, 2, 1])
