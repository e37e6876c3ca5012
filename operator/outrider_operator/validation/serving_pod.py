"""The fields of a serving pod that polls need."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import is_true, name_of, namespace_of, text, uid_of


@dataclass(frozen=True)
class ServingPod:
    namespace: str
    name: str
    uid: str
    address: str
    """IP address; empty before the pod has one."""
    ready: bool


def serving_pod(document: Object) -> ServingPod:
    return ServingPod(
        namespace=namespace_of(document),
        name=name_of(document),
        uid=uid_of(document),
        address=_address(text(document, "status", "podIP")),
        ready=is_true(document, "Ready"),
    )


def _address(address: str) -> str:
    """`address` if it is an IP address, which becomes part of a URL; else empty."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""
