"""What platforms demand of pods: admission as OpenShift's restricted SCC has it, in namespaces that ask for it."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.kubectl import Kubectl

USER = 1000690000
"""Of the namespaces that assign users; OpenShift gives each a range of its own. No image has it in its passwd."""
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
    cluster.wait_until("users to be assigned", lambda: _user_of_a_pod(cluster, namespace) == USER, 60)


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
