"""A service with a draft canary in the cluster in memory: its pods, and what they report."""

from __future__ import annotations

from typing import Any

from outrider_crds.conditions import ConditionType as C
from outrider_crds.counters import ArmCounters
from outrider_crds.rollout_status import RolloutStatus
from outrider_crds.runtime_config import HotConfig, config_hash
from outrider_crds.runtime_state import CanaryState, DrafterReport, RuntimeState
from outrider_operator.cluster_model import CONFIG_MAP, DEPLOYMENT, Node, Object
from outrider_operator.plan import Plan

from tests.unit.operator.decide.world import CPU_NODE, EAGLE, PLD, START, World, boot_of, copied, manifest

NAME = "chat-canary"
HEAD = {"name": "eagle", "method": "Eagle", "eagle": {"model": {"name": "org/another-head"}}}
GAIN, LOSS = 0.1, -0.1
PLAIN_S = 4.0
"""Seconds that plain decoding takes for a request's tokens."""
CANARY: dict[str, Any] = {"strategy": "DraftCanary", "maxSurge": 1}


class CanaryWorld(World):
    def __init__(self, nodes: tuple[Node, ...] | None = (CPU_NODE,), **spec: Any) -> None:
        defaults: dict[str, Any] = {"replicas": 2, "profiling": {"mode": "Skip"}, "rollout": CANARY}
        super().__init__(manifest(**(defaults | spec)), nodes=nodes)
        self.processes = 0
        self.serve()

    def settle(self, name: str = "chat", most: int = 12) -> Plan:
        """Also as often as the operator means to look again at once."""
        for _ in range(most):
            plan = super().settle(name, most)
            if plan.requeue_after_s is None or plan.requeue_after_s > 0.1:
                again = self.reconcile(name)
                if again.is_idle:
                    return again
        raise AssertionError(f"still not idle: {plan}")

    def patched(self, *pool: Object) -> None:
        """The pool is patched, and the canary's pod gets ready."""
        self.change(draftPool=list(pool or (PLD, EAGLE)))
        self.start_canary()

    @property
    def canary(self) -> Object | None:
        """The canary's Deployment."""
        return self.objects.get((DEPLOYMENT, NAME))

    @property
    def order(self) -> dict[str, Any]:
        """What the canary's pods are to measure."""
        hot: dict[str, Any] = self.canary_hot().wire()["canary"]
        return hot

    @property
    def hosted(self) -> list[str]:
        """Names of the drafters that a canary pod hosts."""
        assert self.canary is not None
        revision = self.canary["spec"]["template"]["metadata"]["labels"]["outrider.dev/revision"]
        return [drafter["name"] for drafter in boot_of(self.objects[CONFIG_MAP, f"chat-{revision}"])["draftPool"]]

    @property
    def rollout(self) -> RolloutStatus:
        rollout = self.observed().status.rollout
        assert rollout is not None
        return rollout

    @property
    def phase(self) -> str:
        return self.rollout.phase

    def canary_hot(self) -> HotConfig:
        return HotConfig.model_validate_json(self.objects[CONFIG_MAP, f"{NAME}-hot"]["data"]["config.json"])

    def start_canary(self, *, ready: bool = True, **labels: str) -> None:
        """The Deployment's controller and the kubelet: as many pods as there should be, others go."""
        assert self.canary is not None
        template = self.canary["spec"]["template"]
        revision = template["metadata"]["labels"]["outrider.dev/revision"]
        self.end_canary()
        owner = {"uid": self.canary["metadata"]["uid"], "controller": True}
        metadata = {**template["metadata"], "annotations": self.canary["metadata"]["annotations"]}
        replica_set = {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": {"replicas": 1}}
        for index in range(self.canary["spec"]["replicas"]):
            self.replica_sets[f"{NAME}-{revision}"] = copied(replica_set)
            self.add_pod(f"{NAME}-{index}", template, ready=ready, **labels)

    def end_canary(self) -> None:
        """Its pods and ReplicaSets go."""
        self.pods = {name: pod for name, pod in self.pods.items() if not name.startswith(NAME)}
        self.replica_sets = {
            name: document
            for name, document in self.replica_sets.items()
            if document["metadata"]["labels"].get("outrider.dev/track") != "canary"
        }

    def measure_arms(
        self, requests: int = 1000, gain: float = 0.0, pod: str = f"{NAME}-0", product: str = "cpu", **fields: Any
    ) -> None:
        """The canary's pod reports so many requests of document arm, and both pools loaded."""
        drafters = [DrafterReport(name=name, loaded=True) for name in self.hosted]
        arms = {"stable": arm(requests, 100.0), "candidate": arm(requests, 100.0 * (1 + gain))}
        self.states[pod] = RuntimeState(
            service="chat",
            namespace="default",
            revision="c",
            started_at=START + self.processes,
            reported_at=self.now,
            ready=True,
            plugin_active=True,
            product=product,
            **(
                {
                    "config_hash": config_hash(self.canary_hot()),
                    "drafters": drafters,
                    "canary": CanaryState(id=self.order["id"], **arms),
                }
                | fields
            ),
        )
        self.now += 1
        self.settle()

    def watch(self, duration_s: int) -> None:
        """The operator looks at the canary all the while, as seldom as all of the time counts."""
        for _ in range(duration_s // 120):
            self.now += 120
            self.settle()

    def reasons(self) -> tuple[str, str]:
        """Reasons of Progressing and Updated."""
        return self.reason(C.PROGRESSING), self.reason(C.UPDATED)

    def annotate(self, **orders: str) -> None:
        annotations = {f"outrider.dev/{name}": value for name, value in orders.items()}
        self.services["chat"]["metadata"].setdefault("annotations", {}).update(annotations)


def under_way(**spec: Any) -> CanaryWorld:
    """A service whose canary has measured ten requests of each arm."""
    world = CanaryWorld(**spec)
    world.patched()
    world.measure_arms(10)
    return world


def arm(requests: int, rate: float) -> ArmCounters:
    """Requests of 200 tokens whose prices differ by 20%; `rate` tokens / second."""
    price = 200 / rate
    return ArmCounters(
        requests=requests,
        tokens=requests * 200,
        plain_s=requests * PLAIN_S,
        speculated_s=requests * PLAIN_S,
        price_s=requests * price,
        plain_squared=requests * PLAIN_S**2,
        price_squared=requests * 1.04 * price**2,
        plain_times_price=requests * PLAIN_S * price,
        finished={"chat": requests},
        attained={"chat": requests},
    )
