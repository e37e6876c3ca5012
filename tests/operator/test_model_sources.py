"""Models from images, and certificates: what the API server and the kubelet of a real cluster make of them.

Debian's containerd is 1.6, which mounts no images. One node has a 2.2.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from outrider_crds.runtime_config import CA_FILE
from outrider_operator.kinds import CONFIG_MAP

from tests.cluster import images
from tests.cluster.cluster import Cluster
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster

SKIP = {"profiling": {"mode": "Skip"}}
ABSENT, PRESENT = "outrider.local/models/nowhere:1", "outrider.local/pause:dev"
MODEL, TAINT = "outrider.local/models/llama:1", "outrider.dev/test=image-volumes:NoSchedule"


def test_image_of_a_model_that_cannot_be_pulled_is_named(make: Make) -> None:
    """The kubelet pulls it before any container, and reports it as the container's own image."""
    service = make("absent", target={"name": "llama", "source": {"oci": {"reference": ABSENT}}}, **SKIP)
    message = service.wait("Ready", "False", "ImagePullFailed")["message"]
    assert f"cannot pull {ABSENT}" in message
    assert "source.oci" in message


def test_node_without_image_volumes_is_pod_cannot_start(make: Make) -> None:
    """The image is there; containerd 1.6 takes the volume for a folder without a name."""
    service = make("present", target={"name": "llama", "source": {"oci": {"reference": PRESENT}}}, **SKIP)
    wait_for("a container that cannot be made", partial(_says, service, "mounts no images (source.oci)"))
    assert service.condition("Ready")["reason"] == "PodCannotStart"


@pytest.fixture
def image_node(cluster: Cluster, tmp_path: Path) -> str:
    """A node that mounts images, and has one with a model."""
    node = cluster.add_node(mounts_images=True)
    cluster.kubectl("taint", "node", node, TAINT)  # no other test's pods
    images.write_data_image(tmp_path / "model.tar", MODEL, {"models/8b/config.json": b'{"model_type": "llama"}'})
    cluster.load_image(node, tmp_path / "model.tar")
    return node


def test_pod_reads_its_model_from_an_image(make: Make, cluster: Cluster, namespace: str, image_node: str) -> None:
    """containerd mounts it, read-only, where the boot config says; no download and no claim."""
    source = {"oci": {"reference": MODEL, "path": "models/8b"}}
    placement = {"nodeSelector": {"kubernetes.io/hostname": image_node}, "tolerations": [{"operator": "Exists"}]}
    service = make("from-image", target={"name": "llama", "source": source}, podTemplate=placement, **SKIP)
    service.wait("Ready", "True")
    pod = service.pods()[0]
    (folder,) = [
        mount["mountPath"]
        for mount in pod["spec"]["containers"][0]["volumeMounts"]
        if mount["name"] == "outrider-model-target"
    ]
    inside = ("exec", "-n", namespace, pod["metadata"]["name"], "--")
    assert cluster.kubectl(*inside, "cat", f"{folder}/models/8b/config.json") == '{"model_type": "llama"}'
    assert cluster.try_kubectl(*inside, "touch", f"{folder}/models/8b/new").returncode != 0


def test_certificates_of_the_platform_reach_the_pod(
    make: Make, client: Client, cluster: Cluster, namespace: str
) -> None:
    """Any key of a ConfigMap becomes the one file that the clients' variables name."""
    client.create(CONFIG_MAP, {"metadata": {"name": "ca", "namespace": namespace}, "data": {"b.pem": "authorities"}})
    service = make("trusting", caBundle={"configMap": {"name": "ca", "key": "b.pem"}}, **SKIP)
    service.wait("Ready", "True")
    pod = service.pods()[0]["metadata"]["name"]
    read = 'cat "$AWS_CA_BUNDLE" && echo " $SSL_CERT_FILE $REQUESTS_CA_BUNDLE"'
    assert cluster.kubectl("exec", "-n", namespace, pod, "--", "sh", "-c", read).split() == [
        "authorities", CA_FILE, CA_FILE,
    ]  # fmt: skip


def _says(service: Service, words: str) -> bool:
    return words in service.condition("Ready").get("message", "")
