"""Sources of models and LoRA adapters, the cache that models are downloaded into, and the room for adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider_crds.base import Model, Path, ShortText
from outrider_crds.names import BucketUri, DataKey, HostFolder, Image, ObjectName, ServedName
from outrider_crds.quantity import Size

MOST_ADAPTERS = 32
RETRY_REFUSED_AFTER_S = 3600.0
"""Seconds between attempts at a model or adapter that the hub or bucket refuses. A new token may help, but the operator
may not read the Secret, so it cannot see one."""


class SecretKeyRef(Model):
    name: ObjectName
    """Name of the Secret in the service's namespace."""
    key: DataKey = "token"
    """Key in the Secret that holds the token."""


class HubSource(Model):
    token_secret_ref: SecretKeyRef | None = None
    """Secret with the access token for a gated model. The pod reads it; the operator never does."""


class PvcSource(Model):
    claim_name: ObjectName
    """PersistentVolumeClaim in the service's namespace that holds the files."""
    path: Path
    """Folder inside the volume."""


class HostPathSource(Model):
    path: HostFolder
    """Absolute folder on the node, inside one that the installation allows."""


class OciSource(Model):
    reference: Image
    """Image or artifact that holds the files, for example registry.example.com/models/llama:1, or with a digest. The
    node pulls it, with podTemplate.imagePullSecrets."""
    path: Path | None = None
    """Folder inside the image; the image's root when absent."""


class S3Source(Model):
    uri: BucketUri
    """Folder of the model in an S3 bucket, for example s3://models/llama-8b. Weights are streamed to the device and are
    never on a disk. Credentials and endpoint are those of the pod: its service account, or AWS_* variables."""


class ModelSource(Model):
    hub: HubSource | None = None
    """Download from the model hub by name and revision."""
    pvc: PvcSource | None = None
    """Read from a PersistentVolumeClaim."""
    host_path: HostPathSource | None = None
    """Read from a folder on the node."""
    oci: OciSource | None = None
    """Read from an image that the node pulls (Kubernetes' image volumes)."""
    s3: S3Source | None = None
    """Stream from an S3 bucket (engine.backend vLLM only)."""


class ModelRef(Model):
    name: ShortText
    """The model's name; on the hub, `organisation/model`. Clients of the OpenAI endpoint send that of spec.target."""
    revision: ShortText | None = None
    """Commit, tag or branch on the hub. Pin a commit in production."""
    source: ModelSource = ModelSource(hub=HubSource())
    """Source of the weights: exactly one of hub, pvc, hostPath, oci, s3."""


class PvcCache(Model):
    claim_name: ObjectName
    """PersistentVolumeClaim that keeps downloaded models."""


class EmptyDirCache(Model):
    size_limit: Size | None = None
    """Largest size of the cache, for example 200Gi."""


class ModelCache(Model):
    pvc: PvcCache | None = None
    """Keep downloaded models on a claim that pods share."""
    empty_dir: EmptyDirCache | None = None
    """Keep downloaded models as long as the pod lives."""


class BundleRef(Model):
    name: ObjectName
    """Name of the object in the service's namespace."""
    key: DataKey = "ca.crt"
    """Key in it that holds the certificates, in PEM."""


class CABundle(Model):
    config_map: BundleRef | None = None
    """ConfigMap with the certificates."""
    secret: BundleRef | None = None
    """Secret with the certificates. The pod reads it; the operator never does."""


class AdapterVolume(Model):
    pvc: PvcSource | None = None
    """Folder of a PersistentVolumeClaim."""
    host_path: HostPathSource | None = None
    """Folder on the node."""
    oci: OciSource | None = None
    """Image that holds the adapters and that the node pulls (Kubernetes' image volumes). Another image makes a new
    revision."""


class Lora(Model):
    max_adapters: Annotated[int, Field(ge=1, le=MOST_ADAPTERS)] = 4
    """Adapters that the requests of one engine step may use; requests with another one wait. Each takes memory of the
    device."""
    max_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Highest rank of an adapter. Memory and step times grow with it, whatever the ranks in use."""
    volume: AdapterVolume | None = None
    """Folder that adapters with source.folder are read from, exactly one of pvc, hostPath, oci. Pods mount it
    read-only, and an adapter that is put into a claim or node folder later needs no restart."""


class AdapterFolder(Model):
    path: Path
    """Folder of the adapter inside engine.lora.volume."""


class AdapterRepository(Model):
    repository: ShortText
    """Repository of the adapter on the hub, `organisation/adapter`."""
    revision: ShortText | None = None
    """Commit, tag or branch. Pin a commit in production."""


class AdapterBucket(Model):
    uri: BucketUri
    """Folder of the adapter in an S3 bucket, for example s3://adapters/support-de. Credentials and endpoint are those
    of the pod: its service account, or AWS_* variables."""


class AdapterSource(Model):
    folder: AdapterFolder | None = None
    """Read from a folder of engine.lora.volume."""
    hub: AdapterRepository | None = None
    """Download from the model hub, with the token of the target."""
    s3: AdapterBucket | None = None
    """Download from an S3 bucket."""


class AdapterSpec(Model):
    name: ServedName
    """Name by which requests ask for the adapter, in the field `model`."""
    source: AdapterSource
    """Source of the adapter: exactly one of folder, hub, s3. To replace weights, change the source or the name: a
    folder's contents are read once."""
