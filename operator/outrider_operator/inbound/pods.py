"""Serving pods: which of the pods with Outrider's labels are really a service's."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from outrider_operator.inbound.reading import (
    component,
    controller_uid,
    is_true,
    label,
    name_of,
    namespace_of,
    text,
    uid_of,
)
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.model import SERVICE_LABEL, SERVING, Object

_SOURCE = "pod"


@dataclass(frozen=True)
class ServingPod:
    namespace: str
    service: str
    name: str
    uid: str
    owner: str
    """uid of the ReplicaSet that made it."""
    address: str
    """IP address; empty before it has one."""
    ready: bool


def serving_pod(document: Object) -> ServingPod | Unfit:
    """`document` (a pod with the labels of a serving one); Unfit when a label or the owner is missing."""
    where = f"pod {namespace_of(document)}/{name_of(document)}"
    service, owner = label(document, SERVICE_LABEL), controller_uid(document)
    if component(document) != SERVING or not service:
        return Unfit(_SOURCE, "NoService", f"{where} does not carry the labels of a serving pod")
    if not owner:
        return Unfit(_SOURCE, "NoOwner", f"{where} carries the labels of service {service} and no controller")
    return ServingPod(
        namespace=namespace_of(document),
        service=service,
        name=name_of(document),
        uid=uid_of(document),
        owner=owner,
        address=_address(text(document, "status", "podIP")),
        ready=is_true(document, "Ready"),
    )


def owned_by(replica_sets: Iterable[Object], deployment: Object | None) -> frozenset[str]:
    """uids of the ReplicaSets of `deployment`, and of those without a controller, which it is about to adopt."""
    uid = uid_of(deployment or {})
    return frozenset(uid_of(each) for each in replica_sets if controller_uid(each) in (uid, ""))


def _address(given: str) -> str:
    """Nothing but an IP address becomes part of a URL."""
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        return ""
