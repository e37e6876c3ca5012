"""The InferencePool by which a gateway finds the serving pods.

No other child waits for it: the pods are behind their Service as well.
"""

from __future__ import annotations

from outrider_crds.runtime_config import SERVING_PORT
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import (
    INFERENCE_POOL,
    KUBERNETES_SERVICE,
    Object,
    ServiceIdentity,
    picker_name,
)
from outrider_operator.decide.ownership import Children, labels, owner_reference, selector
from outrider_operator.validation.reading import mapping

PICKER_PORT = 9002
"""Port of an endpoint picker's gRPC service, llm-d's default."""


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


def picker_peers(children: Children, spec: SpeculativeServiceSpec) -> tuple[Object, ...]:
    """NetworkPolicyPeers of the endpoint picker's pods, which read the metrics of the pods that they choose among."""
    if not spec.gateway.inference_pool:
        return ()
    name = picker_name(children.owner.name, spec.gateway.endpoint_picker)
    pods = mapping(children.documents.get((KUBERNETES_SERVICE, name)) or {}, "spec", "selector")
    return ({"podSelector": {"matchLabels": dict(pods)}},) if pods else ()
