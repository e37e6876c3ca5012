"""Volumes of serving and profiling pods: models, caches, scratch space, configuration, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds import runtime_config
from outrider_crds.model_sources import CABundle, ModelSource
from outrider_crds.pod_rules import OUR_VOLUMES
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import Object

RUN_DIR = "/run/outrider"
HOME_DIR = "/home/outrider"
COMPILE_CACHE_DIR = "/var/cache/compile"
_SHARED = "outrider-shared-profile-"


@dataclass(frozen=True)
class Mounted:
    """A volume and where the runtime container mounts it."""

    volume: Object
    mount: Object


def profile_name(target_key: str) -> str:
    """Name of a profile's ConfigMap and of the Job that measures it."""
    return f"outrider-profile-{target_key}"


def shared_profile_name(profile: str) -> str:
    """Return the name of the operator's ConfigMap that holds the profile called `profile` for all namespaces."""
    return profile.replace("outrider-profile-", _SHARED, 1)


def profile_shared_as(shared: str) -> str:
    """Return the name in every other namespace of the profile that is called `shared` in the operator's."""
    return shared.replace(_SHARED, "outrider-profile-", 1)


def model_volumes(spec: SpeculativeServiceSpec) -> list[Mounted]:
    """Target and drafts that come from a claim, an image or the node, read-only; the cache for those from the hub; and
    the certificates that downloads are checked against."""
    models = {
        runtime_config.TARGET_MOUNT: spec.target,
        **{runtime_config.draft_mount(d.name): d.neural.model for d in spec.draft_pool if d.neural},
    }
    mounted = [volume for mount, model in models.items() if (volume := _model(mount, model.source)) is not None]
    return [*mounted, _cache(spec), *([_certificates(spec.ca_bundle)] if spec.ca_bundle is not None else [])]


def adapter_volumes(spec: SpeculativeServiceSpec) -> list[Mounted]:
    """The volume with LoRA adapters, whole: what is put there later needs no other pod."""
    lora = spec.engine.lora
    if lora is None or lora.volume is None:
        return []
    volume = ModelSource(pvc=lora.volume.pvc, host_path=lora.volume.host_path, oci=lora.volume.oci)
    mounted = _model(runtime_config.ADAPTERS_MOUNT, volume)
    return [mounted] if mounted is not None else []


def scratch_volumes() -> list[Mounted]:
    """Everything that must be writable under a read-only root file system."""
    return [
        _mounted("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}),
        _mounted("run", RUN_DIR, {"emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}),
        _mounted("tmp", "/tmp", {"emptyDir": {}}),
        _mounted("home", HOME_DIR, {"emptyDir": {}}),
        _mounted("compile-cache", COMPILE_CACHE_DIR, {"emptyDir": {}}),
    ]


def configuration_volumes(boot: str, hot: str, keys: list[ProfileKeys]) -> list[Mounted]:
    """Boot and hot ConfigMaps, the pod's annotations, and one profile per product.

    Whole folders are mounted, since a subPath mount is never updated. Profiles are optional: no pod waits for one.
    """
    config = [{"key": runtime_config.CONFIG_KEY, "path": runtime_config.CONFIG_KEY}]
    annotations = [{"path": "annotations", "fieldRef": {"fieldPath": "metadata.annotations"}}]
    return [
        _mounted(
            "boot", _folder(runtime_config.BOOT_FILE), {"configMap": {"name": boot, "items": config}}, read_only=True
        ),
        _mounted("hot", _folder(runtime_config.HOT_FILE), {"configMap": {"name": hot}}, read_only=True),
        _mounted("podinfo", runtime_config.PODINFO_DIR, {"downwardAPI": {"items": annotations}}, read_only=True),
        *(
            _mounted(
                f"profile-{index}",
                f"{runtime_config.PROFILES_DIR}/{key.product}",
                {"configMap": {"name": profile_name(key.target), "optional": True}},
                read_only=True,
            )
            for index, key in enumerate(keys)
        ),
    ]


def _model(mount: str, source: ModelSource) -> Mounted | None:
    """None for a model that is downloaded."""
    if source.host_path is not None:
        # type Directory: with none the container runtime would make an empty folder where the model should be.
        volume: Object = {"hostPath": {"path": source.host_path.path, "type": "Directory"}}
    elif source.pvc is not None:
        volume = {"persistentVolumeClaim": {"claimName": source.pvc.claim_name}}
    elif source.oci is not None:
        volume = {"image": {"reference": source.oci.reference}}
    else:
        return None
    return _mounted(f"model-{mount}", f"{runtime_config.MODEL_VOLUMES_DIR}/{mount}", volume, read_only=True)


def _certificates(bundle: CABundle) -> Mounted:
    """The bundle under a name of its own, so that the variables that name it never change."""
    folder, _, file = runtime_config.CA_FILE.rpartition("/")
    if bundle.secret is not None:
        items = [{"key": bundle.secret.key, "path": file}]
        return _mounted("ca", folder, {"secret": {"secretName": bundle.secret.name, "items": items}}, read_only=True)
    assert bundle.config_map is not None
    items = [{"key": bundle.config_map.key, "path": file}]
    return _mounted("ca", folder, {"configMap": {"name": bundle.config_map.name, "items": items}}, read_only=True)


def _cache(spec: SpeculativeServiceSpec) -> Mounted:
    cache = spec.model_cache
    if cache.pvc is not None:
        return _mounted(
            "model-cache",
            runtime_config.MODEL_CACHE_DIR,
            {"persistentVolumeClaim": {"claimName": cache.pvc.claim_name}},
        )
    limit = cache.empty_dir.size_limit if cache.empty_dir else None
    return _mounted("model-cache", runtime_config.MODEL_CACHE_DIR, {"emptyDir": {"sizeLimit": limit} if limit else {}})


def _folder(file: str) -> str:
    return file.rpartition("/")[0]


def _mounted(name: str, path: str, source: Object, *, read_only: bool = False) -> Mounted:
    name = OUR_VOLUMES + name  # the user's volumes must not be called so
    mount: Object = {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})
    return Mounted(volume={"name": name, **source}, mount=mount)
