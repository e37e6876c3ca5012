"""Serving pods without a node: profiling Jobs for their accelerator give way to them."""

from __future__ import annotations

from outrider_operator.decide.pod_spec.placement import labels_match, tolerates
from outrider_operator.decide.pod_spec.template import PRODUCTS_ANNOTATION
from outrider_operator.decide.quantities import quantity
from outrider_operator.decide.reading import annotation, is_being_deleted, items, mapping
from outrider_operator.model import Node, Object, Observed


def waiting_for(observed: Observed, product: str) -> list[Object]:
    """Serving pods that wait for a node of `product`, if there is one that they could ever use."""
    return [
        pod
        for pod in observed.waiting_pods
        if product in annotation(pod, PRODUCTS_ANNOTATION).split(",")
        and not is_being_deleted(pod)
        and _could_run(observed, pod)
    ]


def _could_run(observed: Observed, pod: Object) -> bool:
    """A pod that no node could ever take (a wrong nodeSelector, too many GPUs) must not keep Jobs away for ever."""
    return observed.nodes is None or any(_could_take(node, pod) for node in observed.nodes)


def _could_take(node: Node, pod: Object) -> bool:
    return (
        labels_match(node, mapping(pod, "spec", "nodeSelector"))
        and tolerates(node, items(pod, "spec", "tolerations"))
        and all(_has_room(node, container) for container in items(pod, "spec", "containers"))
    )


def _has_room(node: Node, container: Object) -> bool:
    """Does an empty `node` have what the container requests? A resource that it does not name, it does not have."""
    requests = mapping(container, "resources", "requests")
    return all((quantity(node.allocatable.get(n, "0")) or 0) >= (quantity(v) or 0) for n, v in requests.items())
