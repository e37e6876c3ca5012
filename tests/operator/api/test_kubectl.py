"""What a user of kubectl sees of the SpeculativeService API, on the real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from outrider_crds.generate import crd

from tests import corpus
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import ExistingCluster

pytestmark = pytest.mark.cluster

Api = Cluster | ExistingCluster
_NAMESPACE = "kubectl-view"
_STATUS = {
    "observedGeneration": 1,
    "replicas": 3,
    "readyReplicas": 2,
    "selector": "outrider.dev/service=chat",
    "accelerator": "cpu",
    "summary": {"goodput": "412 tok/s", "speedup": "1.42x", "acceptance": "61%", "slo": "chat 97%"},
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "EndpointReady",
            "message": "2 pods are ready.",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}


@pytest.fixture(scope="module")
def chat(api: Api) -> Iterator[Api]:
    """The cluster with a service called chat, whose status is written as the operator would."""
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}})
    api.kubectl("apply", "-n", _NAMESPACE, "-f", "-", stdin=corpus.good()["least"])
    # What `helm --wait` reads between the creation and the operator's first look.
    assert api.get("specsvc", "chat", namespace=_NAMESPACE)["status"]["observedGeneration"] == -1
    _patch(api, {"status": _STATUS}, "--subresource=status")
    yield api
    api.kubectl("delete", "namespace", _NAMESPACE, "--wait=false")


def test_explain_tells_what_a_draft_pool_is(api: Api) -> None:
    """`kubectl explain` prints the models' docstrings, without their line breaks or types' names."""
    text = " ".join(api.kubectl("explain", "specsvc.spec.draftPool").split())
    assert 'Drafters that may propose tokens. "No speculation" is always a candidate.' in text
    spec = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    method = spec["properties"]["draftPool"]["items"]["properties"]["method"]
    assert method["description"] in text
    assert f"enum: {', '.join(method['enum'][:4])}" in text  # kubectl shows four of them, and the description all
    assert "-required-" in text


def test_get_shows_the_service_at_a_glance(chat: Api) -> None:
    """The printer columns, in order, with what the operator wrote."""
    header, row = chat.kubectl("get", "specsvc", "chat", "-n", _NAMESPACE).splitlines()
    assert header.split() == [
        "NAME", "TARGET", "ACCELERATOR", "READY", "REPLICAS", "GOODPUT", "SPEEDUP", "ACCEPTANCE", "SLO",
        "ROLLOUT", "AGE",
    ]  # fmt: skip
    for cell in ("meta-llama/Llama-3.1-8B-Instruct", " cpu ", "True", "2", "412 tok/s", "1.42x", "61%", "chat 97%"):
        assert cell in row


def test_the_service_is_in_kubectl_get_all(chat: Api) -> None:
    """The category `all`."""
    assert "speculativeservice.outrider.dev/chat" in chat.kubectl("get", "all", "-n", _NAMESPACE, "-o", "name")


def test_an_autoscaler_can_use_the_scale_subresource(chat: Api) -> None:
    """`kubectl scale` sets spec.replicas; the subresource tells how many there are and how to find their pods."""
    chat.kubectl("scale", "specsvc/chat", "--replicas=4", "-n", _NAMESPACE)
    path = f"/apis/outrider.dev/v1alpha1/namespaces/{_NAMESPACE}/speculativeservices/chat/scale"
    scale = json.loads(chat.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 3, "selector": "outrider.dev/service=chat"}
    assert chat.get("specsvc", "chat", namespace=_NAMESPACE)["spec"]["replicas"] == 4


def test_the_status_is_not_written_with_the_spec(chat: Api) -> None:
    """The status subresource: an apply of a manifest cannot overwrite what the operator observed."""
    _patch(chat, {"status": {"replicas": 99}})
    assert chat.get("specsvc", "chat", namespace=_NAMESPACE)["status"]["replicas"] == 3


def test_a_refused_patch_leaves_the_service_as_it_was(chat: Api) -> None:
    """A live service cannot be patched into a state that the rules refuse; the message is the rule's."""
    refused = chat.try_kubectl(
        "patch", "specsvc", "chat", "-n", _NAMESPACE, "--type=merge", "-p",
        json.dumps({"spec": {"accelerator": {"count": 2}}}),
    )  # fmt: skip
    assert refused.returncode != 0
    assert "spec.accelerator.count" in refused.stderr
    assert "count is for GPUs: remove it on cpu" in refused.stderr
    assert "count" not in chat.get("specsvc", "chat", namespace=_NAMESPACE)["spec"]["accelerator"]


@pytest.mark.parametrize("change", ["add", "remove"])
def test_pods_of_a_service_cannot_become_those_of_others(chat: Api, change: str) -> None:
    """Bug: the objects of the former kind stayed behind, also a Job that needs a GPU."""
    existing = {"existing": {"podSelector": {"matchLabels": {"app": "llama"}}}}
    manifest = {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeService",
        "metadata": {"name": "llama", "namespace": _NAMESPACE},
        "spec": {
            "target": {"name": "org/target"},
            "draftPool": [{"name": "lookup", "method": "PromptLookup", "promptLookup": {}}],
            "accelerator": {"products": ["cpu"]},
            **({"workload": existing} if change == "remove" else {}),
        },
    }
    chat.apply(manifest)
    patch = {"spec": {"workload": existing if change == "add" else None}}
    refused = chat.try_kubectl(
        "patch", "specsvc", "llama", "-n", _NAMESPACE, "--type=merge", "-p", json.dumps(patch)
    )  # fmt: skip
    chat.kubectl("delete", "specsvc", "llama", "-n", _NAMESPACE)
    assert refused.returncode != 0
    assert "workload can neither be added to a service nor removed" in refused.stderr


def _patch(api: Api, document: dict[str, object], *arguments: str) -> None:
    api.kubectl(
        "patch", "specsvc", "chat", "-n", _NAMESPACE, "--type=merge", *arguments, "-p", json.dumps(document)
    )  # fmt: skip
