"""Manifests of the small children: ServiceAccount, hot ConfigMap, Service, PodDisruptionBudget, NetworkPolicy."""

from __future__ import annotations

import json

from outrider_crds.runtime_config import ADMIN_PORT, CONFIG_KEY, SERVING_PORT, HotConfig

from outrider_operator.cluster_model import (
    COMPONENT_LABEL,
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    KUBERNETES_SERVICE,
    NETWORK_POLICY,
    SERVICE_ACCOUNT,
    SERVICE_LABEL,
    SERVING,
    WORKER,
    Object,
    ServiceIdentity,
    groups_name,
    hot_map_name,
)
from outrider_operator.decide.ownership import labels, owner_reference, selector


def service_account(owner: ServiceIdentity) -> Object:
    """A ServiceAccount without rights or token: pods do not talk to the API server."""
    return {**_child(owner, "v1", SERVICE_ACCOUNT, owner.name), "automountServiceAccountToken": False}


def hot_map(owner: ServiceIdentity, hot: HotConfig) -> Object:
    data = {CONFIG_KEY: json.dumps(hot.wire(), indent=1, sort_keys=True)}
    return {**_child(owner, "v1", CONFIG_MAP, hot_map_name(owner.name)), "data": data}


def service(owner: ServiceIdentity) -> Object:
    """The OpenAI-compatible endpoint. The admin port is not behind it."""
    port = {"name": "http", "port": 80, "targetPort": SERVING_PORT, "protocol": "TCP"}
    spec = {"selector": selector(owner.name), "ports": [port]}
    return {**_child(owner, "v1", KUBERNETES_SERVICE, owner.name), "spec": spec}


def disruption_budget(owner: ServiceIdentity, unready_canaries: int = 0, *, in_groups: bool = False) -> Object:
    """A budget that lets drains evict one pod at a time, and pods that are not ready always.

    unready_canaries: canary pods that start or crash for hours. They must not block drains of all other nodes.
    in_groups: the pods of groups count, too. A group goes with any of its pods, and the next one is evicted once all of
    its pods are ready again.
    """
    spec = {
        "maxUnavailable": 1 + unready_canaries,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": _pods_of_groups(owner) if in_groups else {"matchLabels": selector(owner.name)},
    }
    return {**_child(owner, "policy/v1", DISRUPTION_BUDGET, owner.name), "spec": spec}


def network_policy(owner: ServiceIdentity, admin_port_peers: tuple[Object, ...], *, in_groups: bool = False) -> Object:
    """A policy that opens the admin port to `admin_port_peers` and the serving port to all.

    in_groups: workers reach leaders on all ports, for collectives choose theirs freely. The rule stands here, so that
    no group is cut apart where a quota refuses `groups_policy`.
    """
    ingress: list[Object] = [
        {"ports": [_port(SERVING_PORT)]},
        {"from": list(admin_port_peers), "ports": [_port(ADMIN_PORT)]},
        *([_from_groups(owner)] if in_groups else []),
    ]
    spec = {"podSelector": {"matchLabels": selector(owner.name)}, "policyTypes": ["Ingress"], "ingress": ingress}
    name = network_policy_name(owner.name)
    return {**_child(owner, "networking.k8s.io/v1", NETWORK_POLICY, name), "spec": spec}


def groups_policy(owner: ServiceIdentity) -> Object:
    """A policy that opens workers to the pods of groups, on all ports. Nothing else reaches a worker."""
    workers = {"matchLabels": {SERVICE_LABEL: owner.name, COMPONENT_LABEL: WORKER}}
    spec = {"podSelector": workers, "policyTypes": ["Ingress"], "ingress": [_from_groups(owner)]}
    return {**_child(owner, "networking.k8s.io/v1", NETWORK_POLICY, groups_name(owner.name)), "spec": spec}


def _from_groups(owner: ServiceIdentity) -> Object:
    """An ingress rule for leaders and workers."""
    return {"from": [{"podSelector": _pods_of_groups(owner)}]}


def _pods_of_groups(owner: ServiceIdentity) -> Object:
    """A LabelSelector of leaders and workers."""
    return {
        "matchLabels": {SERVICE_LABEL: owner.name},
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": [SERVING, WORKER]}],
    }


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
