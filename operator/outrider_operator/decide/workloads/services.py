"""The small children: ServiceAccount, hot ConfigMap, Service, PodDisruptionBudget, NetworkPolicy."""

from __future__ import annotations

import json

from outrider_crds.runtime_config import ADMIN_PORT, CONFIG_KEY, SERVING_PORT, HotConfig
from pydantic import ValidationError

from outrider_operator.decide.ownership import Children, labels, owner_reference, selector
from outrider_operator.inbound.reading import text
from outrider_operator.model import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    KUBERNETES_SERVICE,
    NETWORK_POLICY,
    SERVICE_ACCOUNT,
    Identity,
    Object,
    hot_map_name,
)


def service_account(owner: Identity) -> Object:
    """An identity with no rights and no token: pods do not talk to the API server."""
    return {**_child(owner, "v1", SERVICE_ACCOUNT, owner.name), "automountServiceAccountToken": False}


def hot_map(owner: Identity, hot: HotConfig) -> Object:
    data = {CONFIG_KEY: json.dumps(hot.wire(), indent=1, sort_keys=True)}
    return {**_child(owner, "v1", CONFIG_MAP, hot_map_name(owner.name)), "data": data}


def stored_hot(children: Children) -> HotConfig | None:
    """The hot config that pods mount; None where there is none, or none that can be read."""
    try:
        return HotConfig.read(text(children.own(CONFIG_MAP, hot_map_name(children.owner.name)), "data", CONFIG_KEY))
    except ValidationError:
        return None


def service(owner: Identity) -> Object:
    """The OpenAI-compatible endpoint. The admin port is not behind it."""
    port = {"name": "http", "port": 80, "targetPort": SERVING_PORT, "protocol": "TCP"}
    spec = {"selector": selector(owner.name), "ports": [port]}
    return {**_child(owner, "v1", KUBERNETES_SERVICE, owner.name), "spec": spec}


def disruption_budget(owner: Identity, unready_canaries: int = 0) -> Object:
    """Drains take one pod at a time; pods that are not ready may always go, or a broken one would hold the node. A
    canary pod that starts or crashes for hours must not keep every node of the service from being drained."""
    spec = {
        "maxUnavailable": 1 + unready_canaries,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(owner.name)},
    }
    return {**_child(owner, "policy/v1", DISRUPTION_BUDGET, owner.name), "spec": spec}


def network_policy(owner: Identity, admin_port_peers: tuple[Object, ...]) -> Object:
    """The admin port for those who are named and, as everywhere, the pod's own node; the serving port for everybody."""
    ingress = [{"ports": [_port(SERVING_PORT)]}, {"from": list(admin_port_peers), "ports": [_port(ADMIN_PORT)]}]
    spec = {"podSelector": {"matchLabels": selector(owner.name)}, "policyTypes": ["Ingress"], "ingress": ingress}
    name = network_policy_name(owner.name)
    return {**_child(owner, "networking.k8s.io/v1", NETWORK_POLICY, name), "spec": spec}


def network_policy_name(service: str) -> str:
    """Not the service's own name: many tenants have a policy that is called so."""
    return f"{service}-admin-port"


def _port(number: int) -> Object:
    return {"protocol": "TCP", "port": number}


def _child(owner: Identity, api_version: str, kind: str, name: str) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": labels(owner.name),
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
    }
