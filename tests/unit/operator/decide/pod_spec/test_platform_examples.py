"""examples/platforms: what docs/how-to/fit-your-platform.md says of each is what its pods have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from outrider_crds.manifest import load_manifest
from outrider_crds.profile_keys import profile_keys
from outrider_operator.cluster_model import Node, OperatorSettings, ServiceIdentity
from outrider_operator.decide.pod_spec.placement import has_node
from outrider_operator.decide.pod_spec.template import pod_template
from outrider_operator.decide.profiling.jobs import job_manifest
from outrider_operator.decide.profiling.measurement_request import MeasurementRequest

FOLDER = Path(__file__).parents[5] / "examples" / "platforms"
SETTINGS = OperatorSettings(runtime_image_gpu="gpu", runtime_image_cpu="cpu")
TAINT = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}


def _pods(name: str) -> list[dict[str, Any]]:
    """Templates of the serving pod and of the profiling pod."""
    spec = load_manifest((FOLDER / f"{name}.yaml").read_text()).spec
    keys = profile_keys(spec, spec.accelerator.products[0], "gpu")
    request = MeasurementRequest(keys=keys, target=True, drafters=(), attempt="a", reprofile="")
    job = job_manifest(ServiceIdentity("llama", "ns", "uid"), SETTINGS, spec, "gpu", request)
    return [pod_template(spec, SETTINGS, "llama", "r", "gpu", [keys]), job["spec"]["template"]]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("eks-karpenter-spot", {"karpenter.k8s.aws/instance-gpu-name": "h100", "karpenter.sh/capacity-type": "spot"}),
        ("gke-spot", {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb", "cloud.google.com/gke-spot": "true"}),
    ],
)
def test_pods_ask_for_labels_that_a_node_has_before_it_boots(name: str, labels: dict[str, str]) -> None:
    """Karpenter brings no node for a label that is set after the boot (kubernetes-sigs/karpenter#1219)."""
    spec = load_manifest((FOLDER / f"{name}.yaml").read_text()).spec
    for template in _pods(name):
        placement = str(template["spec"]["affinity"]["nodeAffinity"]) + str(template["spec"].get("nodeSelector"))
        assert all(label in placement and value in placement for label, value in labels.items())
        assert "nvidia.com/gpu.product" not in str(template)
    node = Node("n", labels=labels, taints=(TAINT,), allocatable={"nvidia.com/gpu": "8"})
    admitted = [{"key": "nvidia.com/gpu", "operator": "Exists"}]  # what GKE adds to each pod that asks for GPUs
    assert has_node([node], spec, spec.accelerator.products[0], admitted)


@pytest.mark.parametrize(("name", "notice_s"), [("eks-karpenter-spot", 120), ("gke-spot", 15)])
def test_requests_end_before_a_spot_node(name: str, notice_s: int) -> None:
    """The default drainTimeout outlasts the notice: requests would be cut off by the node's end."""
    serving, _ = _pods(name)
    (container,) = serving["spec"]["containers"]
    arguments = container["args"]
    drain_s = int(arguments[arguments.index("--drain-timeout") + 1].removesuffix("s"))
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain_s < notice_s


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("eks-karpenter-spot", "karpenter.sh/do-not-disrupt"),
        ("gke-spot", "cluster-autoscaler.kubernetes.io/safe-to-evict"),
        ("istio", "traffic.sidecar.istio.io/includeInboundPorts"),
        ("istio", "proxy.istio.io/config"),
    ],
)
def test_annotations_reach_serving_and_profiling_pods(name: str, key: str) -> None:
    assert all(key in template["metadata"]["annotations"] for template in _pods(name))


def test_mesh_leaves_the_admin_port_alone() -> None:
    """The operator reads it in plain HTTP; a port that the proxy takes would keep Updated from ever being True."""
    serving, _ = _pods("istio")
    (container,) = serving["spec"]["containers"]
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    taken = serving["metadata"]["annotations"]["traffic.sidecar.istio.io/includeInboundPorts"].split(",")
    assert taken == [ports["http"]]
    assert ports["admin"] not in taken
