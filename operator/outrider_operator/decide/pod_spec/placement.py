"""Where pods may run: which nodes have a product, and what a pod spec needs to land on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_crds.pod_template import PodTemplate
from outrider_crds.quantity import quantity
from outrider_crds.spec import Accelerator, SpeculativeServiceSpec

from outrider_operator.inbound.reading import items, mapping
from outrider_operator.model import Node, Object

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def gpus(accelerator: Accelerator, tensor_parallel_size: int) -> int:
    return 0 if accelerator.on_cpu else accelerator.count or tensor_parallel_size


def scheduling(spec: SpeculativeServiceSpec, products: list[str]) -> Object:
    """The fields of a pod spec that choose its node: the user's, and the products' node affinity added to them."""
    accelerator, template = spec.accelerator, spec.pod_template
    fields: Object = {
        "affinity": _affinity(template, accelerator, products),
        "nodeSelector": dict(accelerator.node_selector),
        "tolerations": [each.wire() for each in accelerator.tolerations],
        "runtimeClassName": template.runtime_class_name,
        "schedulerName": template.scheduler_name,
    }
    return {name: value for name, value in fields.items() if value}


def resources(spec: SpeculativeServiceSpec) -> Object:
    """The user's requests and limits, and the GPUs among both (extended resources need equal ones)."""
    given: Object = spec.pod_template.resources.wire() if spec.pod_template.resources else {}
    count = gpus(spec.accelerator, spec.engine.tensor_parallel_size)
    if count:
        for block in ("limits", "requests"):
            given[block] = {**given.get(block, {}), spec.accelerator.resource_name: str(count)}
    return given


def node_fits(node: Node, spec: SpeculativeServiceSpec, product: str, tolerations: list[Object]) -> bool:
    """Could a pod for `product` with `tolerations` ever run on `node`? What other pods take there does not count."""
    accelerator = spec.accelerator
    wanted = dict(accelerator.node_selector)
    if not accelerator.on_cpu:
        wanted[accelerator.product_label] = product
    if not labels_match(node, wanted) or not tolerates(node, tolerations):
        return False
    count = gpus(accelerator, spec.engine.tensor_parallel_size)
    return (quantity(node.allocatable.get(accelerator.resource_name, "0")) or 0) >= count


def labels_match(node: Node, wanted: Mapping[str, Any]) -> bool:
    return all(node.labels.get(name) == value for name, value in wanted.items())


def tolerates(node: Node, tolerations: list[Object]) -> bool:
    """True when each taint that keeps pods off `node` is tolerated."""
    return all(
        taint.get("effect") == "PreferNoSchedule" or any(_tolerates(each, taint) for each in tolerations)
        for taint in node.taints
    )


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return toleration["key"] == taint.get("key") and (toleration.get("operator") == "Exists" or same_value)


def _affinity(template: PodTemplate, accelerator: Accelerator, products: list[str]) -> Object:
    """The user's affinity with the product in each of its node selector terms: terms are alternatives."""
    affinity: Object = template.affinity.wire() if template.affinity else {}
    if accelerator.on_cpu:
        return affinity
    product = {"key": accelerator.product_label, "operator": "In", "values": products}
    required = mapping(affinity, "nodeAffinity", _REQUIRED)
    terms = [
        {**term, "matchExpressions": [*items(term, "matchExpressions"), product]}
        for term in items(required, "nodeSelectorTerms") or [{}]
    ]
    node = {**mapping(affinity, "nodeAffinity"), _REQUIRED: {**required, "nodeSelectorTerms": terms}}
    return {**affinity, "nodeAffinity": node}
