"""`spec.podTemplate`: the part of serving pods that users may set, in Kubernetes' own terms, closed and bounded."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from outrider_crds.base import KubernetesModel, MapList, Model
from outrider_crds.names import (
    FIELD_PATH_PATTERN,
    Annotations,
    DataKey,
    DriverName,
    HostFolder,
    Image,
    Labels,
    MountPath,
    ObjectName,
    RelativePath,
    VariableName,
    VolumeName,
)
from outrider_crds.quantity import Quantity, Size
from outrider_crds.scheduling import Affinity, TopologySpreadConstraint

FileMode = Annotated[int, Field(ge=0, le=0o777)]
VariableValue = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class EnvVar(KubernetesModel):
    name: VariableName
    """Name of the variable."""
    value: VariableValue = ""
    """Its value."""


class DataRef(KubernetesModel):
    name: ObjectName
    """Name of the object in the service's namespace."""
    key: DataKey
    """Key in it."""
    optional: bool | None = None
    """True where pods start without it."""


class FieldRef(KubernetesModel):
    api_version: Literal["v1"] | None = None
    """Always v1."""
    field_path: Annotated[str, Field(max_length=300, pattern=FIELD_PATH_PATTERN)]
    """Field of the pod, for example metadata.name."""


class ContainerResource(StrEnum):
    LIMITS_CPU = "limits.cpu"
    LIMITS_MEMORY = "limits.memory"
    LIMITS_STORAGE = "limits.ephemeral-storage"
    REQUESTS_CPU = "requests.cpu"
    REQUESTS_MEMORY = "requests.memory"
    REQUESTS_STORAGE = "requests.ephemeral-storage"


class ResourceFieldRef(KubernetesModel):
    resource: ContainerResource
    """Limit or request of the runtime container."""


class EnvVarSource(KubernetesModel):
    secret_key_ref: DataRef | None = None
    """An entry of a Secret."""
    config_map_key_ref: DataRef | None = None
    """An entry of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod."""
    resource_field_ref: ResourceFieldRef | None = None
    """A limit or request of the runtime container."""


class PodEnvVar(EnvVar):
    value_from: EnvVarSource | None = None
    """Where the value comes from, in place of `value`."""


class ObjectRef(KubernetesModel):
    name: ObjectName
    """Name of the object in the service's namespace."""
    optional: bool | None = None
    """True where pods start without it."""


class EnvFromSource(KubernetesModel):
    prefix: VariableName | None = None
    """Text before each name."""
    config_map_ref: ObjectRef | None = None
    """Every entry of a ConfigMap."""
    secret_ref: ObjectRef | None = None
    """Every entry of a Secret."""


class PullSecret(KubernetesModel):
    name: ObjectName
    """Name of the Secret in the service's namespace."""


class Resources(KubernetesModel):
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] = {}
    """Most that the runtime container may use."""
    requests: Annotated[dict[str, Quantity], Field(max_length=16)] = {}
    """What a node must have free for the runtime container; the limits when absent."""


class KeyToPath(KubernetesModel):
    key: DataKey
    """Key in the object."""
    path: RelativePath
    """File in the volume."""
    mode: FileMode | None = None
    """Permission bits of the file."""


Items = Annotated[list[KeyToPath], Field(max_length=32)]


class ConfigMapVolume(KubernetesModel):
    name: ObjectName
    """Name of the ConfigMap in the service's namespace."""
    items: Items = []
    """Entries to write and where; all of them when absent."""
    default_mode: FileMode | None = None
    """Permission bits of the files."""
    optional: bool | None = None
    """True where pods start without it."""


class SecretVolume(KubernetesModel):
    secret_name: ObjectName
    """Name of the Secret in the service's namespace."""
    items: Items = []
    """Entries to write and where; all of them when absent."""
    default_mode: FileMode | None = None
    """Permission bits of the files."""
    optional: bool | None = None
    """True where pods start without it."""


class EmptyDirVolume(KubernetesModel):
    medium: Literal["Memory"] | None = None
    """Memory keeps it in the node's memory."""
    size_limit: Size | None = None
    """Largest size, for example 20Gi."""


class ClaimVolume(KubernetesModel):
    claim_name: ObjectName
    """PersistentVolumeClaim in the service's namespace."""
    read_only: bool | None = None
    """True mounts it for reading only."""


class HostPathVolume(KubernetesModel):
    path: HostFolder
    """Absolute path on the node, inside a folder that the installation allows. It is mounted for reading only."""
    type: Literal["Directory", "File"] | None = None
    """What must be there; nothing is checked when absent."""


class NfsVolume(KubernetesModel):
    server: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[!-~]+$")]
    """Name or address of the server."""
    path: HostFolder
    """Absolute path that the server exports."""
    read_only: bool | None = None
    """True mounts it for reading only."""


class CsiVolume(KubernetesModel):
    driver: DriverName
    """Name of the driver."""
    fs_type: Annotated[str, Field(max_length=16, pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    """File system."""
    read_only: bool | None = None
    """True mounts it for reading only."""
    volume_attributes: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=32)] = {}
    """What the driver is told."""
    node_publish_secret_ref: PullSecret | None = None
    """Secret that the driver is given."""


class Volume(KubernetesModel):
    name: VolumeName
    """Name of the volume, unique among the volumes."""
    config_map: ConfigMapVolume | None = None
    """Files from a ConfigMap."""
    secret: SecretVolume | None = None
    """Files from a Secret."""
    empty_dir: EmptyDirVolume | None = None
    """An empty folder that lives as long as the pod."""
    persistent_volume_claim: ClaimVolume | None = None
    """A PersistentVolumeClaim."""
    nfs: NfsVolume | None = None
    """A folder of an NFS server."""
    csi: CsiVolume | None = None
    """An inline volume of a CSI driver."""
    host_path: HostPathVolume | None = None
    """A folder or file of the node, where the installation allows it."""


class VolumeMount(KubernetesModel):
    name: VolumeName
    """One of `volumes`."""
    mount_path: MountPath
    """Absolute path in the container, unique among the mounts."""
    read_only: bool | None = None
    """True mounts it for reading only; hostPath volumes must be."""
    sub_path: RelativePath | None = None
    """Path inside the volume; its root when absent."""


class PodTemplate(Model):
    labels: Labels = {}
    """Further labels of serving and profiling pods."""
    annotations: Annotations = {}
    """Further annotations of serving and profiling pods."""
    resources: Resources | None = None
    """Resource requests and limits of the runtime container; GPUs are added from `accelerator`."""
    env: Annotated[list[PodEnvVar], Field(max_length=32), MapList("name")] = []
    """Further environment of the runtime container, in Kubernetes form (valueFrom included)."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=16)] = []
    """Further environment sources of the runtime container."""
    image_pull_secrets: Annotated[list[PullSecret], Field(max_length=8), MapList("name")] = []
    """Secrets for pulling the image."""
    affinity: Affinity | None = None
    """Further affinity; the product's node affinity is always added."""
    topology_spread_constraints: Annotated[
        list[TopologySpreadConstraint], Field(max_length=8), MapList("topologyKey", "whenUnsatisfiable")
    ] = []
    """How pods spread over nodes and zones."""
    priority_class_name: ObjectName | None = None
    """Priority class of serving pods."""
    runtime_class_name: ObjectName | None = None
    """Runtime class of serving and profiling pods."""
    scheduler_name: ObjectName | None = None
    """Scheduler of serving and profiling pods."""
    volumes: Annotated[list[Volume], Field(max_length=16), MapList("name")] = []
    """Further volumes."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=16), MapList("mountPath")] = []
    """Where the runtime container mounts them."""
    image: Image | None = None
    """Runtime image; the release's own when absent."""
