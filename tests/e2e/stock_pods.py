"""Pods of vLLM's own server, as a platform's manifests make them, on a node without GPUs and without a registry."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import httpx
import yaml
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, POD, SERVICE
from outrider_runtime.identity import engine_version

from setup.steps import REPOSITORY
from tests.cluster.cluster import Cluster
from tests.cluster.images import OURS
from tests.e2e.conftest import PATIENCE_S
from tests.operator.client import Client, Service, wait_for

EXAMPLE = REPOSITORY / "examples" / "existing"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
TARGET = "/srv/models/smollm2-135m-instruct"
HEAD = "/srv/models/smollm2-135m-eagle3"
FLAGS = ("--served-model-name=llama", "--enforce-eager", "--max-model-len=1024", "--max-num-seqs=4", "--dtype=float32")
_NAMES = "vllm-names"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HOME": "/tmp",
    "KMP_BLOCKTIME": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": ":".join([f"/{_NAMES}", *(f"{OURS}/checkout/{part}" for part in ("crds", "runtime", ""))]),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def kustomized(cluster: Cluster, folder: Path) -> dict[str, dict[str, Any]]:
    """Kind -> document of what `kubectl kustomize` makes of a folder."""
    return {document["kind"]: document for document in yaml.safe_load_all(cluster.kubectl("kustomize", str(folder)))}


def name_vllm(cluster: Cluster) -> None:
    """A ConfigMap by which vLLM has its usual name: its command line asks for the version of `vllm`, and the build for
    CPUs is called vllm-cpu."""
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {engine_version()}+cpu\n"
    cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _NAMES}, "data": {"METADATA": metadata}}
    )


def runnable(deployment: dict[str, Any]) -> dict[str, Any]:
    """The Deployment with this machine's image, a small model for its own, and nothing that needs a GPU."""
    document = copy.deepcopy(deployment)
    document["spec"] |= {"replicas": 1, "progressDeadlineSeconds": int(PATIENCE_S)}
    pod = document["spec"]["template"]["spec"]
    pod["volumes"] = [
        *(volume for volume in pod.get("volumes", []) if volume["name"] != "shared-memory"),
        {"name": "models", "hostPath": {"path": "/srv/models"}},
        {"name": _NAMES, "configMap": {"name": _NAMES}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    (vllm,) = pod["containers"]
    folder = f"/{_NAMES}/vllm-{engine_version()}+cpu.dist-info"
    vllm |= {
        "image": "outrider.local/runtime-cpu:dev",
        "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": {"cpu": "500m", "memory": "2Gi"}},
        "env": [*vllm.get("env", []), *({"name": name, "value": value} for name, value in _ENVIRONMENT.items())],
        "volumeMounts": [
            *(mount for mount in vllm.get("volumeMounts", []) if mount["mountPath"] != "/dev/shm"),
            {"name": "models", "mountPath": "/srv/models", "readOnly": True},
            {"name": _NAMES, "mountPath": folder},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe in vllm:  # a busy machine is slow, not wrong
            vllm[probe] = {**vllm[probe], "timeoutSeconds": 30, "failureThreshold": 200}
    for words in ("command", "args"):
        vllm[words] = [TARGET if word == MODEL else word for word in vllm.get(words, [])]
    vllm["args"] += FLAGS  # of a repeated flag the last one counts
    pod.pop("runtimeClassName", None)
    return document


def service_for(service: dict[str, Any], name: str, labels: dict[str, str], **existing: Any) -> dict[str, Any]:
    """The example's service for other pods, on CPUs, with a head that is on the node."""
    document = copy.deepcopy(service)
    document["metadata"] = {"name": name, "namespace": "default"}
    spec = document["spec"]
    spec["workload"]["existing"] = {"podSelector": {"matchLabels": labels}, **existing}
    spec["accelerator"] = {"products": ["cpu"]}
    spec["draftPool"][1]["eagle"]["model"] = {"name": "smollm2-135m-eagle3", "source": {"hostPath": {"path": HEAD}}}
    return document


class StockPods:
    """A workload that others made, its pods, and the service that selects them."""

    def __init__(self, cluster: Cluster, service: dict[str, Any], documents: list[dict[str, Any]]) -> None:
        """documents: objects of the workload, a Deployment among them."""
        self.client = Client(str(cluster.kubeconfig))
        self.service_document = service
        self.service = Service(self.client, "default", service["metadata"]["name"])
        self._cluster = cluster
        self._documents = documents
        (self._name,) = (it["metadata"]["name"] for it in documents if it["kind"] == "Deployment")
        self.client.create(SERVICE, service)  # first, so that the pods start with its file
        wait_for("the file", lambda: self.client.get(CONFIG_MAP, "default", f"{self.service.name}-config"))
        name_vllm(cluster)
        cluster.apply(*(runnable(it) if it["kind"] == "Deployment" else it for it in documents))
        rollout = ("rollout", "status", f"deployment/{self._name}", f"--timeout={PATIENCE_S:.0f}s")
        cluster.kubectl(*rollout, timeout_s=PATIENCE_S)
        wait_for("an answer", self._answers, timeout_s=PATIENCE_S)

    def deployment(self) -> dict[str, Any]:
        document = self.client.get(DEPLOYMENT, "default", self._name)
        assert document is not None
        return document

    def all(self) -> list[dict[str, Any]]:
        labels = self.service_document["spec"]["workload"]["existing"]["podSelector"]["matchLabels"]
        return self.client.list(POD, "default", ",".join(f"{name}={value}" for name, value in labels.items()))

    def restarts(self) -> list[int]:
        return [status["restartCount"] for pod in self.all() for status in pod["status"]["containerStatuses"]]

    def ask(self, path: str = "/v1/completions") -> httpx.Response:
        """The answer of the only pod."""
        (pod,) = self.all()
        url = f"http://{pod['status']['podIP']}:8000{path}"
        body = {"model": "llama", "prompt": "one two three one two three one", "max_tokens": 64, "temperature": 0}
        return httpx.post(url, json=body, timeout=PATIENCE_S) if path.startswith("/v1") else httpx.get(url)

    def end(self) -> None:
        """Delete the workload and the service."""
        self.client.delete(SERVICE, "default", self.service.name)
        for document in self._documents:
            self._cluster.kubectl("delete", document["kind"], document["metadata"]["name"], "--wait")
        wait_for("the pods' end", lambda: not self.all(), timeout_s=PATIENCE_S)

    def _answers(self) -> bool:
        try:
            return self.ask("/health").status_code == 200
        except httpx.HTTPError:
            return False
