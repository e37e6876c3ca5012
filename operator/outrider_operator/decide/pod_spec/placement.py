"""Where pods may run: which nodes have a product, and what a pod spec needs to land on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from outrider_crds.pod_template import PodTemplate
from outrider_crds.quantity import quantity
from outrider_crds.spec import Accelerator, SpeculativeServiceSpec

from outrider_operator.inbound.reading import items, mapping, text
from outrider_operator.model import Node, Object

NODE_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def gpus(accelerator: Accelerator, tensor_parallel_size: int) -> int:
    return 0 if accelerator.on_cpu else accelerator.count or tensor_parallel_size


def scheduling(spec: SpeculativeServiceSpec, products: list[str], hostnames: Sequence[str] = ()) -> Object:
    """The fields of a pod spec that choose its node: the user's, and the products' node affinity added to them.

    With `hostnames` the pod lands on one of these nodes or waits: no autoscaler makes a node of that name.
    """
    accelerator, template = spec.accelerator, spec.pod_template
    fields: Object = {
        "affinity": _affinity(template, accelerator, products, hostnames),
        "nodeSelector": dict(accelerator.node_selector),
        "tolerations": [each.wire() for each in accelerator.tolerations],
    }
    return {name: value for name, value in fields.items() if value}


def resources(spec: SpeculativeServiceSpec) -> Object:
    """The user's requests and limits, and the GPUs among both (extended resources need equal ones)."""
    given: Object = spec.pod_template.resources.wire() if spec.pod_template.resources else {}
    count = gpus(spec.accelerator, spec.engine.tensor_parallel_size)
    if count and not claims_devices(spec):
        for block in ("limits", "requests"):
            given[block] = {**given.get(block, {}), spec.accelerator.resource_name: str(count)}
    return given


def claims_devices(spec: SpeculativeServiceSpec) -> bool:
    """The user names resource claims (DRA) for the container: its GPUs come by them, not by a device plugin."""
    resources = spec.pod_template.resources
    return resources is not None and bool(resources.others.get("claims"))


def patched_tolerations(spec: SpeculativeServiceSpec) -> list[Object]:
    """Tolerations of podTemplate. Kubernetes has yet to judge them: texts alone count."""
    tolerations = items(spec.pod_template.others, "tolerations")
    return [{key: value for key, value in fields.items() if isinstance(value, str)} for fields in tolerations]


def has_node(
    nodes: Iterable[Node] | None, spec: SpeculativeServiceSpec, product: str, admitted: Iterable[Object]
) -> bool:
    """Is there a node for `product`? `admitted` are tolerations that admission gave to pods. Unseen nodes fit."""
    return nodes is None or is_room_among(nodes, spec, product, all_tolerations(spec, admitted))


def all_tolerations(spec: SpeculativeServiceSpec, admitted: Iterable[Object]) -> list[Object]:
    own = (toleration.wire() for toleration in spec.accelerator.tolerations)
    return [*own, *patched_tolerations(spec), *admitted]


def is_room_among(
    nodes: Iterable[Node], spec: SpeculativeServiceSpec, product: str, tolerations: Iterable[Object]
) -> bool:
    """Could a pod for `product` with `tolerations` ever run on one of `nodes`?"""
    return any(True for _ in fitting_nodes(nodes, spec, product, tolerations))


def fitting_nodes(
    nodes: Iterable[Node], spec: SpeculativeServiceSpec, product: str, tolerations: Iterable[Object]
) -> Iterator[Node]:
    """The `nodes` that a pod for `product` with `tolerations` could ever run on. What other pods take there does not
    count."""
    accelerator = spec.accelerator
    own = {} if accelerator.on_cpu else {accelerator.product_label: product}
    wanted = {**accelerator.node_selector, **mapping(spec.pod_template.others, "nodeSelector"), **own}
    count = 0 if claims_devices(spec) else gpus(accelerator, spec.engine.tensor_parallel_size)
    given = tuple(tolerations)

    @cache  # a cluster has few taints, on thousands of nodes
    def is_tolerated(key: str, value: str, effect: str) -> bool:
        return effect == "PreferNoSchedule" or any(_tolerates(each, key, value, effect) for each in given)

    return (
        node
        for node in nodes
        if all(node.labels.get(name) == value for name, value in wanted.items())
        and (quantity(node.allocatable.get(accelerator.resource_name, "0")) or 0) >= count
        and all(is_tolerated(text(each, "key"), text(each, "value"), text(each, "effect")) for each in node.taints)
    )


def _tolerates(toleration: Object, key: str, value: str, effect: str) -> bool:
    """A taint of that key, value and effect."""
    if toleration.get("effect") not in (None, "", effect):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = (toleration.get("value") or "") == value
    return toleration["key"] == key and (toleration.get("operator") == "Exists" or same_value)


def _affinity(template: PodTemplate, accelerator: Accelerator, products: list[str], hostnames: Sequence[str]) -> Object:
    """The user's affinity with product and nodes in each of its node selector terms: terms are alternatives."""
    affinity = {kind: rules for kind, rules in mapping(template.others, "affinity").items() if rules is not None}
    labels = {} if accelerator.on_cpu else {accelerator.product_label: products}
    labels |= {NODE_HOSTNAME: list(hostnames)} if hostnames else {}
    if not labels:
        return affinity
    ours = [{"key": key, "operator": "In", "values": values} for key, values in labels.items()]
    required = mapping(affinity, "nodeAffinity", _REQUIRED)
    terms = [
        {**term, "matchExpressions": [*items(term, "matchExpressions"), *ours]}
        for term in items(required, "nodeSelectorTerms") or [{}]
    ]
    node = {**mapping(affinity, "nodeAffinity"), _REQUIRED: {**required, "nodeSelectorTerms": terms}}
    return {**affinity, "nodeAffinity": node}
