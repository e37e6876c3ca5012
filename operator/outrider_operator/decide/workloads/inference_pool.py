"""The InferencePool by which a gateway finds the serving pods.

No other child waits for it: the pods are behind their Service as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.runtime_config import SERVING_PORT
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import (
    INFERENCE_POOL,
    KUBERNETES_SERVICE,
    KindAccess,
    Object,
    ServiceIdentity,
    picker_name,
)
from outrider_operator.decide.drift import stamp
from outrider_operator.decide.ownership import Children, labels, owner_reference, selector
from outrider_operator.validation.reading import mapping

PICKER_PORT = 9002
"""Port of an endpoint picker's gRPC service, llm-d's default."""
EXTENSION_LOOK_S = 60.0
"""No watch tells when the extension is installed."""


@dataclass(frozen=True)
class PoolPlan:
    desired: tuple[Object, ...] = ()
    """Stamped objects that there should be."""
    unwanted: tuple[Object, ...] = ()
    """Objects that there should not be any more."""
    requeue_after_s: float | None = None


def inference_pool(owner: ServiceIdentity, spec: SpeculativeServiceSpec) -> Object:
    """Selects serving pods, those of a rollout and of a canary too, as the Service does."""
    picker = {
        "group": "",
        "kind": KUBERNETES_SERVICE,
        "name": picker_name(owner.name, spec.gateway.endpoint_picker),
        "port": {"number": PICKER_PORT},
        "failureMode": "FailOpen",  # requests go on without the picker, as they do without a gateway
    }
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": INFERENCE_POOL,
        "metadata": {
            "name": owner.name,
            "namespace": owner.namespace,
            "labels": labels(owner.name),
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
        "spec": {
            "selector": {"matchLabels": selector(owner.name)},
            "targetPorts": [{"number": SERVING_PORT}],
            "endpointPickerRef": picker,
        },
    }


def plan_pool(children: Children, spec: SpeculativeServiceSpec, access: KindAccess) -> PoolPlan:
    if not spec.gateway.inference_pool:
        own = children.own(INFERENCE_POOL, children.owner.name)
        return PoolPlan(unwanted=(own,) if own is not None else ())
    if access is not KindAccess.SERVED:
        return PoolPlan(requeue_after_s=EXTENSION_LOOK_S)
    return PoolPlan(desired=(stamp(inference_pool(children.owner, spec)),))


def picker_peers(children: Children, spec: SpeculativeServiceSpec) -> tuple[Object, ...]:
    """NetworkPolicyPeers of the endpoint picker's pods, which read the metrics of the pods that they choose among."""
    if not spec.gateway.inference_pool:
        return ()
    name = picker_name(children.owner.name, spec.gateway.endpoint_picker)
    pods = mapping(children.documents.get((KUBERNETES_SERVICE, name)) or {}, "spec", "selector")
    return ({"podSelector": {"matchLabels": dict(pods)}},) if pods else ()
