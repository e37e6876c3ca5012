"""`spec.podTemplate`: a patch for pods, which Kubernetes validates. Only fields that Outrider uses are declared."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from outrider_crds.base import KubernetesModel, MapList
from outrider_crds.names import HostFolder, Image, LabelKey, LabelValue, MountPath, VariableName
from outrider_crds.quantity import Quantity

Block = dict[str, Any]
VariableValue = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
Text = Annotated[str, Field(max_length=253)]
AnnotationText = Annotated[str, Field(max_length=16384)]


class EnvVar(KubernetesModel):
    name: VariableName
    """Name of the variable."""
    value: VariableValue = ""
    """Its value."""


class OpenModel(KubernetesModel):
    """A Kubernetes type of which only some fields are declared. All other fields are kept unchanged in `others`."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})

    others: SkipJsonSchema[Block] = {}

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = {field.alias or name for name, field in cls.model_fields.items() if name != "others"}
        named = {name: item for name, item in value.items() if name in names}
        return {**named, "others": {name: item for name, item in value.items() if name not in names}}

    @model_serializer(mode="wrap")
    def _spread(self, handler: SerializerFunctionWrapHandler) -> Block:
        named: Block = handler(self)
        named.pop("others", None)
        return {**named, **self.others}


class PodEnvVar(OpenModel):
    name: VariableName
    """Name of the variable."""


class EnvFromSource(OpenModel):
    """A source of variables, in Kubernetes form."""


class Resources(OpenModel):
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] = {}
    """Most that the runtime container may use."""
    requests: Annotated[dict[str, Quantity], Field(max_length=16)] = {}
    """What a node must have free for the runtime container; the limits when absent."""


class HostPathVolume(OpenModel):
    path: HostFolder
    """Absolute path on the node, inside a folder that the installation allows. It is mounted for reading only."""
    type: Literal["Directory", "File"] | None = None
    """Kind of the path, which must exist: nothing is created. Absent: not checked."""


class Volume(OpenModel):
    name: Text
    """Name of the volume, unique among the volumes."""
    host_path: HostPathVolume | None = None
    """A folder or file of the node, where the installation allows it."""


class VolumeMount(OpenModel):
    name: Text
    """One of `volumes`."""
    mount_path: MountPath
    """Absolute path in the container, unique among the mounts."""
    read_only: bool | None = None
    """True mounts it for reading only; hostPath volumes must be."""


class PodTemplate(OpenModel):
    """Any field of a pod's spec; those that are not declared here are in `others`."""

    labels: Annotated[dict[str, Text], Field(max_length=32)] = {}
    """Further labels of serving and profiling pods."""
    annotations: Annotated[dict[str, AnnotationText], Field(max_length=32)] = {}
    """Further annotations of serving and profiling pods."""
    resources: Resources | None = None
    """Requests, limits and claims of the runtime container; GPUs are added from `accelerator` unless it has claims."""
    env: Annotated[list[PodEnvVar], Field(max_length=64), MapList("name")] = []
    """Further environment of the runtime container, in Kubernetes form (valueFrom included)."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=16)] = []
    """Further environment sources of the runtime container."""
    volumes: Annotated[list[Volume], Field(max_length=32), MapList("name")] = []
    """Further volumes, of any kind that Kubernetes has."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32), MapList("mountPath")] = []
    """Mounts of the runtime container."""
    image: Image | None = None
    """Runtime image; the release's own when absent."""


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(KubernetesModel):
    key: LabelKey | None = None
    """Taint key. Absent: every key; operator must then be Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """Equal (the default) compares the value; Exists takes any."""
    value: LabelValue | None = None
    """Taint value; for Equal."""
    effect: TaintEffect | None = None
    """Taint effect. Absent: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds that a NoExecute taint is tolerated. Absent: for ever."""
