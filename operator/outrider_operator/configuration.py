"""The operator's settings: environment variables OUTRIDER_*, which the Helm chart sets."""

from __future__ import annotations

import json
import posixpath
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

from outrider_crds.base import Percent, seconds
from pydantic import AfterValidator, AliasGenerator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

RELEASE = "0.1.0"
_PREFIX = "OUTRIDER_"
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "plain"]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


class ConfigurationError(ValueError):
    """A variable has a value that the operator cannot use."""


def _names(value: object) -> object:
    return sorted({name.strip() for name in value.split(",")} - {""}) if isinstance(value, str) else value


def _objects(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be a JSON list of objects") from None


def _seconds(value: object) -> object:
    return seconds(value) if isinstance(value, str) else value


def _absolute(folder: str) -> str:
    if not folder.startswith("/") or posixpath.normpath(folder) != folder:
        raise ValueError(f"{folder!r} must be an absolute path without '..', '//' and a '/' at its end")
    return folder


def _existing(file: str) -> str:
    if file and not Path(file).is_file():
        raise ValueError("no such file")
    return file


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]
Folder = Annotated[str, AfterValidator(_absolute)]
File = Annotated[str, AfterValidator(_existing)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Interval = Annotated[Seconds, Field(gt=0)]
Address = Annotated[str, Field(pattern="^(https?://.+)?$"), AfterValidator(lambda address: address.rstrip("/"))]


class OperatorSettings(BaseSettings):
    """Values of the chart, which are fixed for the life of the operator's process."""

    model_config = SettingsConfigDict(
        alias_generator=AliasGenerator(validation_alias=lambda name: f"{_PREFIX}{name.removesuffix('_s').upper()}"),
        env_prefix=_PREFIX,
        env_ignore_empty=True,
        frozen=True,
        populate_by_name=True,
    )

    namespace: str = ""
    """Namespace of the operator and of its Lease."""
    pod_name: str = Field(default_factory=socket.gethostname)
    """Name under which this process holds the Lease."""
    lease_name: str = "outrider-operator"
    watch_namespaces: Names = ()
    """Namespaces with managed services; empty: all namespaces."""
    watch_nodes: bool = True
    """False if RBAC does not allow to read nodes."""
    runtime_image_gpu: str = f"outrider/runtime:{RELEASE}"
    """Default image of GPU services."""
    runtime_image_cpu: str = f"outrider/runtime-cpu:{RELEASE}"
    """Default image of services on `cpu`."""
    runtime_upgrade_percent: Percent = 0
    """Share of the services that move to these images. The others stay on the image that they started with."""
    runtime_image_pull_policy: PullPolicy = "IfNotPresent"
    allowed_host_paths: Annotated[tuple[Folder, ...], NoDecode, BeforeValidator(_names)] = ()
    """Folders of nodes, with all subfolders, that pods may read; empty: no hostPath is allowed."""
    platform_assigns_user: bool = False
    """True if pods must not set user and group, because the platform assigns them per namespace (OpenShift)."""
    admin_port_peers: Annotated[tuple[dict[str, Any], ...], NoDecode, BeforeValidator(_objects)] = ()
    """NetworkPolicyPeers that may reach the serving pods' admin port; empty: no NetworkPolicy is created."""
    prometheus_url: Address = ""
    prometheus_ca_file: File = ""
    """File with the CA bundle for Prometheus' certificate; empty: the system's CAs."""
    prometheus_token_file: File = ""
    """File with the bearer token for Prometheus."""
    prometheus_timeout_s: Interval = 10.0
    """Timeout of one query."""
    profiling_priority_class: str = ""
    """Priority class of profiling Jobs (below serving, never preempting); empty: the cluster's default."""
    resync_interval_s: Interval = 60.0
    metrics_window_s: Interval = 60.0
    """Length of the window of the status figures."""
    no_capacity_after_s: Seconds = 60.0
    """Seconds without a node after which a pod means NoCapacity, unless an autoscaler adds a node for it."""
    profiling_shared_from: Names = ()
    """Namespaces whose measurements all namespaces use."""
    runtime_engine_version_gpu: str = ""
    """Version of vLLM in `runtime_image_gpu`; empty if it is unknown."""
    runtime_engine_version_cpu: str = ""
    """Version of vLLM in `runtime_image_cpu`; empty if it is unknown."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "json"
    health_port: Port = 8080
    metrics_port: Port = 8081

    @property
    def prometheus_configured(self) -> bool:
        return bool(self.prometheus_url)


def read_settings() -> OperatorSettings:
    """Settings of this process's environment. Raises ConfigurationError, which names each variable that is wrong."""
    try:
        settings = OperatorSettings()
    except ValidationError as error:
        problems = [f"{e['loc'][0]}={e['input']!r}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
        raise ConfigurationError("; ".join(problems)) from None
    if not settings.namespace:
        raise ConfigurationError(f"{_PREFIX}NAMESPACE is not set; the Helm chart sets it")
    return settings
