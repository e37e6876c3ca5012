"""`modelCache.pvc` on a real cluster: one Job fills the claim, and pods wait for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from outrider_operator.kinds import DEPLOYMENT, JOB

from tests.cluster.cluster import Cluster
from tests.operator.claims import HUB_TARGET, Claim
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster

SKIP = {"profiling": {"mode": "Skip"}}


def test_pods_wait_for_one_download_that_reports_progress(
    make: Make, cluster: Cluster, client: Client, namespace: str, tmp_path: Path
) -> None:
    """Three pods, one download; the figures come from the Job's own pod."""
    claim = Claim(cluster, namespace, tmp_path / "volume", "weights")
    service = make("filling", standin={"prefetch": "wait"}, replicas=3, **claim.field, **HUB_TARGET, **SKIP)
    service.wait("Progressing", "True", "WaitingForModels")
    wait_for("progress", partial(_says, service, "3Gi of 12Gi (25%)"))
    assert service.read()["status"]["prefetch"]["phase"] == "Downloading"
    assert client.get(DEPLOYMENT, service.namespace, service.name) is None
    (claim.folder / "go").touch()
    service.wait("Updated", "True")
    assert service.read()["status"]["prefetch"]["phase"] == "Complete"
    assert (claim.folder / "downloads").read_text().splitlines() == ["--target tests/hub-model@"]


def test_sidecar_of_a_mesh_holds_up_no_download(
    make: Make, cluster: Cluster, client: Client, namespace: str, tmp_path: Path
) -> None:
    """An ordinary sidecar kept the Job active: no Deployment ever came. The Job goes once pods have the models."""
    inject_sidecars(cluster, namespace)
    claim = Claim(cluster, namespace, tmp_path / "volume", "meshed")
    service = make("meshed", **claim.field, **HUB_TARGET, **SKIP)
    service.wait("Updated", "True")
    wait_for("the Job's end", lambda: client.get(JOB, service.namespace, f"{service.name}-prefetch") is None)


def inject_sidecars(cluster: Cluster, namespace: str) -> None:
    """Put a container that never ends into each pod of a download."""
    name, kind = f"sidecars-{namespace}", {"apiVersion": "admissionregistration.k8s.io/v1"}
    sidecar = 'Object.spec.containers{name: "mesh", image: object.spec.containers[0].image, command: ["sleep", "3600"]}'
    patch = {"expression": f'[JSONPatch{{op: "add", path: "/spec/containers/-", value: {sidecar}}}]'}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    matched = {"matchLabels": {"outrider.dev/component": "prefetch"}}
    there = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    spec = {
        "matchConstraints": {"resourceRules": [rule], "namespaceSelector": there, "objectSelector": matched},
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": patch}],
    }
    cluster.apply({**kind, "kind": "MutatingAdmissionPolicy", "metadata": {"name": name}, "spec": spec})
    binding = {"kind": "MutatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": {"policyName": name}}
    cluster.apply({**kind, **binding})
    metadata = {"name": "probe", "namespace": namespace, "labels": matched["matchLabels"]}
    containers = {"automountServiceAccountToken": False, "containers": [{"name": "probe", "image": "probe"}]}
    probe = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": containers})
    create = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    wait_for("the policy", lambda: '"mesh"' in cluster.kubectl(*create, stdin=probe))


def _says(service: Service, words: str) -> bool:
    return words in service.condition("Progressing").get("message", "")
