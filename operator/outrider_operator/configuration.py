"""The operator's configuration: environment variables OUTRIDER_*, which the Helm chart sets."""

from __future__ import annotations

import json
import posixpath
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outrider_crds.base import seconds

from outrider_operator.cluster_model import METRICS_WINDOW_S, Object

RELEASE = "0.1.0"
_PREFIX = "OUTRIDER_"
_T = TypeVar("_T")


class ConfigurationError(ValueError):
    """A variable has a value that the operator cannot use."""


@dataclass(frozen=True)
class Configuration:
    namespace: str
    """Namespace of the operator's Lease."""
    pod_name: str
    """Name under which this process holds the Lease."""
    lease_name: str = "outrider-operator"
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces with managed services; empty: all namespaces."""
    watch_nodes: bool = True
    """False if RBAC does not allow to read nodes."""
    runtime_image: str = f"outrider/runtime:{RELEASE}"
    runtime_cpu_image: str = f"outrider/runtime-cpu:{RELEASE}"
    runtime_upgrade_percent: int = 0
    """Share of the services that move to these images. The others stay on the image that they started with."""
    image_pull_policy: str = "IfNotPresent"
    allowed_host_paths: tuple[str, ...] = ()
    """Folders of nodes that pods may read; empty: no hostPath is allowed."""
    platform_assigns_user: bool = False
    """True if the platform refuses pods that set a user or group (OpenShift)."""
    admin_port_peers: tuple[Object, ...] = ()
    """NetworkPolicyPeers that may reach the serving pods' admin port; empty: no NetworkPolicy is created."""
    prometheus_url: str = ""
    prometheus_ca_file: str = ""
    """File with the CA bundle for Prometheus' certificate; empty: the system's CAs."""
    prometheus_token_file: str = ""
    """File with the bearer token for Prometheus."""
    prometheus_timeout_s: float = 10.0
    """Timeout of one query."""
    profiling_priority_class: str = ""
    resync_interval_s: float = 60.0
    metrics_window_s: float = METRICS_WINDOW_S
    """Length of the window of the status figures."""
    no_capacity_after_s: float = 60.0
    """Seconds without a node after which a pod means NoCapacity, unless an autoscaler adds a node for it."""
    profiles_shared_from: tuple[str, ...] = ()
    """Namespaces whose measurements all namespaces use."""
    engine_version: str = ""
    """Version of vLLM in `runtime_image`; empty if it is unknown."""
    engine_version_cpu: str = ""
    """Version of vLLM in `runtime_cpu_image`; empty if it is unknown."""
    log_level: str = "info"
    log_format: str = "json"
    health_port: int = 8080
    metrics_port: int = 8081


def read_configuration(environment: Mapping[str, str]) -> Configuration:
    """Read the configuration. Raises ConfigurationError with the name of the variable that is wrong or missing."""

    def read(name: str, parse: Callable[[str], _T], default: _T | None = None) -> _T:
        text = environment.get(_PREFIX + name, "")
        if not text:
            if default is None:
                raise ConfigurationError(f"{_PREFIX}{name} is not set; the Helm chart sets it")
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ConfigurationError(f"{_PREFIX}{name}={text!r}: {error}") from None

    standard = Configuration(namespace="", pod_name="")
    return Configuration(
        namespace=read("NAMESPACE", str),
        pod_name=read("POD_NAME", str, socket.gethostname()),
        lease_name=read("LEASE_NAME", str, standard.lease_name),
        watch_namespaces=read("WATCH_NAMESPACES", _names, standard.watch_namespaces),
        watch_nodes=read("WATCH_NODES", _boolean, standard.watch_nodes),
        runtime_image=read("RUNTIME_IMAGE", str, standard.runtime_image),
        runtime_cpu_image=read("RUNTIME_CPU_IMAGE", str, standard.runtime_cpu_image),
        runtime_upgrade_percent=read("RUNTIME_UPGRADE_PERCENT", _percent, standard.runtime_upgrade_percent),
        image_pull_policy=read(
            "RUNTIME_IMAGE_PULL_POLICY", _one_of("Always", "IfNotPresent", "Never"), standard.image_pull_policy
        ),
        allowed_host_paths=read("ALLOWED_HOST_PATHS", _folders, standard.allowed_host_paths),
        platform_assigns_user=read("PLATFORM_ASSIGNS_USER", _boolean, standard.platform_assigns_user),
        admin_port_peers=read("ADMIN_PORT_PEERS", _objects, standard.admin_port_peers),
        prometheus_url=read("PROMETHEUS_URL", _address, standard.prometheus_url),
        prometheus_ca_file=read("PROMETHEUS_CA_FILE", _file, standard.prometheus_ca_file),
        prometheus_token_file=read("PROMETHEUS_TOKEN_FILE", _file, standard.prometheus_token_file),
        prometheus_timeout_s=read("PROMETHEUS_TIMEOUT", seconds, standard.prometheus_timeout_s),
        profiling_priority_class=read("PROFILING_PRIORITY_CLASS", str, standard.profiling_priority_class),
        resync_interval_s=read("RESYNC_INTERVAL", seconds, standard.resync_interval_s),
        metrics_window_s=read("METRICS_WINDOW", seconds, standard.metrics_window_s),
        no_capacity_after_s=read("NO_CAPACITY_AFTER", seconds, standard.no_capacity_after_s),
        profiles_shared_from=read("PROFILES_SHARED_FROM", _names, standard.profiles_shared_from),
        engine_version=read("ENGINE_VERSION", str, standard.engine_version),
        engine_version_cpu=read("ENGINE_VERSION_CPU", str, standard.engine_version_cpu),
        log_level=read("LOG_LEVEL", _one_of("debug", "info", "warning", "error"), standard.log_level),
        log_format=read("LOG_FORMAT", _one_of("json", "plain"), standard.log_format),
        health_port=read("HEALTH_PORT", _port, standard.health_port),
        metrics_port=read("METRICS_PORT", _port, standard.metrics_port),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))


def _objects(text: str) -> tuple[Object, ...]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError("must be a JSON list of objects")
    return tuple(values)


def _folders(text: str) -> tuple[str, ...]:
    folders = _names(text)
    for folder in folders:
        if not folder.startswith("/") or posixpath.normpath(folder) != folder:
            raise ValueError(f"{folder!r} must be an absolute path without '..', '//' and a '/' at its end")
    return folders


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    return text.rstrip("/")


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError("no such file")
    return text


def _percent(text: str) -> int:
    share = int(text)
    if not 0 <= share <= 100:
        raise ValueError("must be a whole number of percent, 0 to 100")
    return share


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 65536:
        raise ValueError("must be a port between 1 and 65535")
    return number
