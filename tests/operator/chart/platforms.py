"""What platforms demand: users assigned as OpenShift's restricted SCC does, and networks that deny by default."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.operator.client import PATIENCE_S
from tests.operator.manifests import IMAGE

USER = 1000690000
"""User id that namespaces assign, as OpenShift does from a range per namespace. No image has it in its passwd."""
ASSIGNS_USER = {"tests/assigns-user": "true"}
"""Label of such a namespace."""

_PODS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
_ASSIGNED = f"Object.spec.securityContext{{runAsUser: {USER}, fsGroup: {USER}}}"


def assign_users(cluster: Kubectl, namespace: str) -> None:
    """Pods that name no user get one; pods that name another are refused. Returns once that is in force."""
    mutation = {
        "patchType": "ApplyConfiguration",
        "applyConfiguration": {"expression": f"Object{{spec: Object.spec{{securityContext: {_ASSIGNED}}}}}"},
    }
    cluster.apply(
        _policy(
            "MutatingAdmissionPolicy",
            mutations=[mutation],
            reinvocationPolicy="Never",
            matchConditions=[{"name": "names-none", "expression": "!has(object.spec.securityContext.runAsUser)"}],
        ),
        _binding("MutatingAdmissionPolicyBinding"),
        _policy(
            "ValidatingAdmissionPolicy",
            validations=[{"expression": f"object.spec.securityContext.runAsUser == {USER}"}],
        ),
        _binding("ValidatingAdmissionPolicyBinding", validationActions=["Deny"]),
    )
    cluster.wait_until("users to be assigned", lambda: _user_of_a_pod(cluster, namespace) == USER, PATIENCE_S)


def deny_by_default(cluster: Kubectl, namespace: str) -> None:
    """No pod of the namespace is reached by anybody, but what another policy allows."""
    spec: dict[str, Any] = {"podSelector": {}, "policyTypes": ["Ingress"]}
    metadata = {"name": "default-deny", "namespace": namespace}
    cluster.apply({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec})


def client_pod(name: str, namespace: str) -> dict[str, Any]:
    """A pod to connect from, as restricted as a serving one."""
    container = {
        "name": "main",
        "image": IMAGE,
        "command": ["sleep", "3600"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"containers": [container], "securityContext": security, "terminationGracePeriodSeconds": 0},
    }


def reaches(cluster: Kubectl, name: str, namespace: str, address: str, port: int) -> bool:
    """Whether a connection from that pod is taken within two seconds."""
    script = f"import socket; socket.create_connection(('{address}', {port}), timeout=2)"
    done = cluster.try_kubectl("exec", name, "-n", namespace, "--", "python", "-c", script)
    return done.returncode == 0


def _user_of_a_pod(cluster: Kubectl, namespace: str) -> int | None:
    """None while none is assigned: the pod is refused then."""
    done = cluster.try_kubectl("run", "probe", "--image=x", "-n", namespace, "--dry-run=server", "-o", "json")
    user: int | None = json.loads(done.stdout)["spec"]["securityContext"].get("runAsUser") if done.stdout else None
    return user


def _policy(kind: str, **spec: Any) -> dict[str, Any]:
    constraints = {"resourceRules": [_PODS]}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": "restricted-users"},
        "spec": {"failurePolicy": "Fail", "matchConstraints": constraints, **spec},
    }


def _binding(kind: str, **spec: Any) -> dict[str, Any]:
    selected = {"namespaceSelector": {"matchLabels": ASSIGNS_USER}}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": "restricted-users"},
        "spec": {"policyName": "restricted-users", "matchResources": selected, **spec},
    }
