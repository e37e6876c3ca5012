"""Models from images, and certificates: what the API server and the kubelet of a real cluster make of them.

The rig's containerd is 1.6, which mounts no images: that a pod reads a model from one is not shown here.
"""

from __future__ import annotations

from functools import partial

import pytest
from outrider_crds.runtime_config import CA_FILE
from outrider_operator.kinds import CONFIG_MAP

from tests.cluster.cluster import Cluster
from tests.operator.client import Client, Service, wait_for
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster

SKIP = {"profiling": {"mode": "Skip"}}
ABSENT, PRESENT = "outrider.local/models/nowhere:1", "outrider.local/pause:dev"


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
