"""What Outrider sets in a pod, a user cannot set: the rules know every name."""

from __future__ import annotations

import pytest
from outrider_crds.engine_rules import RESERVED_ENV, RESERVED_ENV_PREFIX
from outrider_crds.manifest import ManifestError, load_manifest
from outrider_crds.profile_keys import ProfileKeys
from outrider_operator.decide.pod_spec.container import environment
from outrider_operator.decide.pod_spec.volumes import configuration_volumes, model_volumes, scratch_volumes

from tests import corpus


def test_every_variable_of_a_pod_is_reserved() -> None:
    """A variable that the operator adds without telling the rules could be overridden from the manifest."""
    ours = {variable["name"] for variable in environment(load_manifest(corpus.good()["least"]).spec)}
    assert ours, "the operator sets at least HOME"
    unprotected = {name for name in ours if name not in RESERVED_ENV and not name.startswith(RESERVED_ENV_PREFIX)}
    assert unprotected == set()


def test_no_mount_of_a_user_can_take_the_place_of_ours() -> None:
    """Two mounts of one path, or two volumes of one name, cannot be applied; one above ours would hide it."""
    spec = load_manifest(corpus.good()["host-path"]).spec
    keys = [ProfileKeys(product="cpu", target="7e", drafters={})]
    ours = [*configuration_volumes("boot", "hot", keys), *model_volumes(spec), *scratch_volumes()]
    for mounted in ours:
        for path in (mounted.mount["mountPath"], mounted.mount["mountPath"].rpartition("/")[0]):
            if path.count("/") > 1 or path in ("/tmp", "/etc", "/run", "/dev", "/home"):
                assert "spec.podTemplate.volumeMounts[0].mountPath" in _refusal("data", path)
        assert "spec.podTemplate.volumes[0].name" in _refusal(mounted.volume["name"], "/mnt")


def _refusal(volume: str, path: str) -> str:
    mount = f"volumes: [{{name: {volume}, emptyDir: {{}}}}], volumeMounts: [{{name: {volume}, mountPath: {path}}}]"
    with pytest.raises(ManifestError) as refusal:
        load_manifest(corpus.good()["least"] + f"  podTemplate: {{{mount}}}\n")
    return str(refusal.value)
