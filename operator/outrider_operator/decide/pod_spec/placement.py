"""Placement of pods: which nodes offer a product, and the fields of a pod spec that select them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from outrider_crds.pod_template import PodTemplate
from outrider_crds.quantity import quantity
from outrider_crds.spec import Accelerator, SpeculativeServiceSpec

from outrider_operator.cluster_model import Node, Object
from outrider_operator.validation.reading import items, mapping, text

NODE_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def scheduling(spec: SpeculativeServiceSpec, products: list[str], hostnames: Sequence[str] = ()) -> Object:
    """The fields of a pod spec that choose its node: the user's, plus node affinity to the products, if there are any.

    With `hostnames` the pod runs on one of these nodes or waits: no autoscaler adds a node of that name.
    """
    accelerator, template = spec.accelerator, spec.pod_template
    fields: Object = {
        "affinity": _affinity(template, accelerator, products, hostnames),
        "nodeSelector": dict(accelerator.node_selector),
        "tolerations": [toleration.wire() for toleration in accelerator.tolerations],
    }
    return {name: value for name, value in fields.items() if value}


def resources(spec: SpeculativeServiceSpec) -> Object:
    """The user's requests and limits, plus the GPUs in both: extended resources need equal values."""
    fields: Object = spec.pod_template.resources.wire() if spec.pod_template.resources else {}
    count = spec.gpus_per_pod
    if count and not claims_devices(spec):
        for block in ("limits", "requests"):
            fields[block] = {**fields.get(block, {}), spec.accelerator.resource_name: str(count)}
    return fields


def resources_without_devices(spec: SpeculativeServiceSpec) -> Object:
    """The user's requests and limits, which name no GPUs, without claims: for a pod that needs no device."""
    fields = spec.pod_template.resources.wire() if spec.pod_template.resources else {}
    return {name: field for name, field in fields.items() if name != "claims"}


def claims_devices(spec: SpeculativeServiceSpec) -> bool:
    """Does the container name resource claims (DRA)? Then its GPUs come from them, not from a device plugin."""
    resources = spec.pod_template.resources
    return resources is not None and bool(resources.others.get("claims"))


def patched_tolerations(spec: SpeculativeServiceSpec) -> list[Object]:
    """Tolerations of podTemplate. They are not validated yet, so values other than texts are left out."""
    tolerations = items(spec.pod_template.others, "tolerations")
    return [{key: value for key, value in fields.items() if isinstance(value, str)} for fields in tolerations]


def has_node(
    nodes: Iterable[Node] | None, spec: SpeculativeServiceSpec, product: str, admitted: Iterable[Object]
) -> bool:
    """Is there a node for `product`? True if nodes cannot be read. admitted: tolerations that admission added."""
    return nodes is None or next(fitting_nodes(nodes, spec, product, admitted), None) is not None


def fitting_nodes(
    nodes: Iterable[Node], spec: SpeculativeServiceSpec, product: str, admitted: Iterable[Object]
) -> Iterator[Node]:
    """The `nodes` that a pod for `product` could run on, whatever other pods use there. admitted: as in `has_node`."""
    accelerator = spec.accelerator
    own = {} if accelerator.on_cpu else {accelerator.product_label: product}
    labels = {**accelerator.node_selector, **mapping(spec.pod_template.others, "nodeSelector"), **own}
    count = 0 if claims_devices(spec) else spec.gpus_per_pod
    own_tolerations = (toleration.wire() for toleration in accelerator.tolerations)
    tolerated = (*own_tolerations, *patched_tolerations(spec), *admitted)

    @cache  # a cluster has few taints, on thousands of nodes
    def is_tolerated(key: str, value: str, effect: str) -> bool:
        return effect == "PreferNoSchedule" or any(
            _tolerates(toleration, key, value, effect) for toleration in tolerated
        )

    return (
        node
        for node in nodes
        if all(node.labels.get(name) == value for name, value in labels.items())
        and (quantity(node.allocatable.get(accelerator.resource_name, "0")) or 0) >= count
        and all(is_tolerated(text(taint, "key"), text(taint, "value"), text(taint, "effect")) for taint in node.taints)
    )


def _tolerates(toleration: Object, key: str, value: str, effect: str) -> bool:
    """Does `toleration` tolerate the taint with this key, value and effect?"""
    if toleration.get("effect") not in (None, "", effect):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = (toleration.get("value") or "") == value
    return toleration["key"] == key and (toleration.get("operator") == "Exists" or same_value)


def _affinity(template: PodTemplate, accelerator: Accelerator, products: list[str], hostnames: Sequence[str]) -> Object:
    """The user's affinity with product and nodes added to each node selector term: terms are alternatives."""
    affinity = {kind: rules for kind, rules in mapping(template.others, "affinity").items() if rules is not None}
    labels = {accelerator.product_label: products} if products and not accelerator.on_cpu else {}
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
