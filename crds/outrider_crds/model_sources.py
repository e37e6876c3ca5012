"""Sources of models, and the cache that they are downloaded into."""

from __future__ import annotations

from outrider_crds.base import Model, Path, ShortText
from outrider_crds.names import BucketUri, DataKey, HostFolder, Image, ObjectName
from outrider_crds.quantity import Size


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
