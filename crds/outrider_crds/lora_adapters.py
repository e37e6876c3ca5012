"""LoRA adapters of the target, and the room for them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider_crds.base import Model, Path, ShortText
from outrider_crds.model_sources import HostPathSource, OciSource, PvcSource
from outrider_crds.names import BucketUri, ServedName

MOST_ADAPTERS = 32


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
