"""The small children: ServiceAccount, hot ConfigMap, Service, PodDisruptionBudget, NetworkPolicy."""

from __future__ import annotations

import json

from outrider_crds.runtime_config import ADMIN_PORT, CONFIG_KEY, SERVING_PORT, HotConfig

from outrider_operator.decide.ownership import labels, owner_reference, selector
from outrider_operator.model import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    SERVICE,
    SERVICE_ACCOUNT,
    Object,
    Observed,
)


def service_account(observed: Observed) -> Object:
    """An identity with no rights and no token: pods do not talk to the API server."""
    return {**_child(observed, "v1", SERVICE_ACCOUNT, observed.name), "automountServiceAccountToken": False}


def hot_map(observed: Observed, hot: HotConfig) -> Object:
    data = {CONFIG_KEY: json.dumps(hot.wire(), indent=1, sort_keys=True)}
    return {**_child(observed, "v1", CONFIG_MAP, f"{observed.name}-hot"), "data": data}


def service(observed: Observed) -> Object:
    """The OpenAI-compatible endpoint. The admin port is not behind it."""
    port = {"name": "http", "port": 80, "targetPort": SERVING_PORT, "protocol": "TCP"}
    spec = {"selector": selector(observed.name), "ports": [port]}
    return {**_child(observed, "v1", SERVICE, observed.name), "spec": spec}


def disruption_budget(observed: Observed) -> Object:
    """Drains take one pod at a time; pods that are not ready may always go, or a broken one would hold the node."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(observed.name)},
    }
    return {**_child(observed, "policy/v1", DISRUPTION_BUDGET, observed.name), "spec": spec}


def network_policy(observed: Observed, admin_port_peers: tuple[Object, ...]) -> Object:
    """The admin port for those who are named and, as everywhere, the pod's own node; the serving port for everybody."""
    ingress = [{"ports": [_port(SERVING_PORT)]}, {"from": list(admin_port_peers), "ports": [_port(ADMIN_PORT)]}]
    spec = {"podSelector": {"matchLabels": selector(observed.name)}, "policyTypes": ["Ingress"], "ingress": ingress}
    name = network_policy_name(observed.name)
    return {**_child(observed, "networking.k8s.io/v1", NETWORK_POLICY, name), "spec": spec}


def network_policy_name(service: str) -> str:
    """Not the service's own name: many tenants have a policy that is called so."""
    return f"{service}-admin-port"


def _port(number: int) -> Object:
    return {"protocol": "TCP", "port": number}


def _child(observed: Observed, api_version: str, kind: str, name: str) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": observed.namespace,
            "labels": labels(observed.name),
            "ownerReferences": [owner_reference(observed, controller=True)],
        },
    }
