"""Models from images and buckets, and the certificates of a platform's own authority: in serving and profiling pods."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.runtime_config import CA_FILE
from outrider_operator.cluster_model import DEPLOYMENT, JOB, Object

from tests.unit.operator.decide.world import World, boot_of, manifest

IMAGE = "registry.example.com/models/llama:1"
FROM_IMAGE = {"name": "llama", "source": {"oci": {"reference": IMAGE, "path": "models/8b"}}}
FROM_BUCKET = {"name": "llama", "source": {"s3": {"uri": "s3://models/llama"}}}


def pods(**spec: Any) -> list[Object]:
    """Specs of the serving pod and of the profiling pod."""
    world = World(manifest(**spec)).settled()
    world.replace_pods()
    kinds = {kind: document for (kind, _), document in world.objects.items()}
    return [kinds[kind]["spec"]["template"]["spec"] for kind in (DEPLOYMENT, JOB)]


def _mounts(pod: Object, volume: str) -> list[Object]:
    return [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == volume]


def test_models_of_images_are_mounted_read_only() -> None:
    """The node pulls each image once for all of its pods."""
    draft = {"name": "small", "method": "DraftModel", "draftModel": {"model": {**FROM_IMAGE, "name": "small"}}}
    for pod in pods(target=FROM_IMAGE, draftPool=[draft]):
        for mount in ("target", "draft-small"):
            volume: Object = {"name": f"outrider-model-{mount}", "image": {"reference": IMAGE}}
            assert volume in pod["volumes"]
            (mounted,) = _mounts(pod, volume["name"])
            assert mounted["mountPath"] == f"/var/lib/outrider/models/{mount}"
            assert mounted["readOnly"] is True


def test_models_of_buckets_need_no_volume() -> None:
    for pod in pods(target=FROM_BUCKET):
        assert not [volume for volume in pod["volumes"] if volume["name"].startswith("outrider-model-target")]


@pytest.mark.parametrize(
    ("bundle", "source"),
    [
        ({"configMap": {"name": "ca"}}, {"configMap": {"name": "ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}),
        (
            {"secret": {"name": "ca", "key": "b.pem"}},
            {"secret": {"secretName": "ca", "items": [{"key": "b.pem", "path": "ca.crt"}]}},
        ),
    ],
)
def test_certificates_are_mounted_and_named_to_every_client(bundle: Object, source: Object) -> None:
    """The hub's client, requests and the S3 client each look at a variable of their own."""
    for pod in pods(target=FROM_BUCKET, caBundle=bundle):
        assert {"name": "outrider-ca", **source} in pod["volumes"]
        (mounted,) = _mounts(pod, "outrider-ca")
        assert f"{mounted['mountPath']}/ca.crt" == CA_FILE
        variables = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
            assert variables[name] == CA_FILE


def test_variables_of_the_user_win_over_the_bundle() -> None:
    """One client may need another file."""
    env = [{"name": "SSL_CERT_FILE", "value": "/etc/mine.pem"}]
    serving, _ = pods(caBundle={"configMap": {"name": "ca"}}, engine={"env": env})
    assert {"name": "SSL_CERT_FILE", "value": "/etc/mine.pem"} in serving["containers"][0]["env"]


def test_bundle_makes_a_revision_and_keeps_the_profile() -> None:
    """Pods read it when they start, and it moves no step time."""
    world = World(manifest(target=FROM_BUCKET)).served()
    before, measured = world.revision(), len(world.created_jobs)
    keys = boot_of(world.objects["ConfigMap", f"chat-{before}"])["profileKeys"]
    world.change(caBundle={"configMap": {"name": "ca"}})
    after = world.revision()
    assert after != before
    assert boot_of(world.objects["ConfigMap", f"chat-{after}"])["profileKeys"] == keys
    assert len(world.created_jobs) == measured
