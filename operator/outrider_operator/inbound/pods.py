"""Serving pods: what of one is read to ask it for its state."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from outrider_operator.inbound.reading import is_true, name_of, namespace_of, text, uid_of
from outrider_operator.model import Object


@dataclass(frozen=True)
class ServingPod:
    namespace: str
    name: str
    uid: str
    address: str
    """IP address; empty before it has one."""
    ready: bool


def serving_pod(document: Object) -> ServingPod:
    return ServingPod(
        namespace=namespace_of(document),
        name=name_of(document),
        uid=uid_of(document),
        address=_address(text(document, "status", "podIP")),
        ready=is_true(document, "Ready"),
    )


def _address(given: str) -> str:
    """Nothing but an IP address becomes part of a URL."""
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        return ""
