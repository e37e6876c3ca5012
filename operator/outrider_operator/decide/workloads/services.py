"""Manifests of the small children: ServiceAccount, hot ConfigMap, Service, PodDisruptionBudget, NetworkPolicy."""

from __future__ import annotations

import json

from outrider_crds.runtime_config import ADMIN_PORT, CONFIG_KEY, SERVING_PORT, HotConfig
from pydantic import ValidationError

from outrider_operator.cluster_model import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    KUBERNETES_SERVICE,
    NETWORK_POLICY,
    SERVICE_ACCOUNT,
    Object,
    ServiceIdentity,
    hot_map_name,
)
from outrider_operator.decide.ownership import Children, labels, owner_reference, selector
from outrider_operator.validation.reading import text


def service_account(owner: ServiceIdentity) -> Object:
    """A ServiceAccount without rights or token: pods do not talk to the API server."""
    return {**_child(owner, "v1", SERVICE_ACCOUNT, owner.name), "automountServiceAccountToken": False}


def hot_map(owner: ServiceIdentity, hot: HotConfig) -> Object:
    data = {CONFIG_KEY: json.dumps(hot.wire(), indent=1, sort_keys=True)}
    return {**_child(owner, "v1", CONFIG_MAP, hot_map_name(owner.name)), "data": data}


def stored_hot(children: Children) -> HotConfig | None:
    """The hot config that pods mount; None if it is missing or cannot be read."""
    try:
        return HotConfig.read(text(children.own(CONFIG_MAP, hot_map_name(children.owner.name)), "data", CONFIG_KEY))
    except ValidationError:
        return None


def service(owner: ServiceIdentity) -> Object:
    """The OpenAI-compatible endpoint. The admin port is not behind it."""
    port = {"name": "http", "port": 80, "targetPort": SERVING_PORT, "protocol": "TCP"}
    spec = {"selector": selector(owner.name), "ports": [port]}
    return {**_child(owner, "v1", KUBERNETES_SERVICE, owner.name), "spec": spec}


def disruption_budget(owner: ServiceIdentity, unready_canaries: int = 0) -> Object:
    """A budget that lets drains evict one pod at a time, and pods that are not ready always.

    unready_canaries: canary pods that start or crash for hours. They must not block drains of all other nodes.
    """
    spec = {
        "maxUnavailable": 1 + unready_canaries,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(owner.name)},
    }
    return {**_child(owner, "policy/v1", DISRUPTION_BUDGET, owner.name), "spec": spec}


def network_policy(owner: ServiceIdentity, admin_port_peers: tuple[Object, ...]) -> Object:
    """A policy that opens the admin port to `admin_port_peers` and the serving port to all."""
    ingress = [{"ports": [_port(SERVING_PORT)]}, {"from": list(admin_port_peers), "ports": [_port(ADMIN_PORT)]}]
    spec = {"podSelector": {"matchLabels": selector(owner.name)}, "policyTypes": ["Ingress"], "ingress": ingress}
    name = network_policy_name(owner.name)
    return {**_child(owner, "networking.k8s.io/v1", NETWORK_POLICY, name), "spec": spec}


def network_policy_name(service: str) -> str:
    """Name of the policy. It differs from the service's name, which many tenants use for a policy of their own."""
    return f"{service}-admin-port"


def _port(number: int) -> Object:
    return {"protocol": "TCP", "port": number}


def _child(owner: ServiceIdentity, api_version: str, kind: str, name: str) -> Object:
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
