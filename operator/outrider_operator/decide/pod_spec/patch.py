"""Apply `spec.podTemplate` to pods as a strategic merge patch, and find fields that it must not set.

Kubernetes validates the result. Problems here are fields that take a pod out of Outrider's control or its sandbox, and
security settings that violate Pod Security "baseline" or weaken Outrider's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider_crds.pod_rules import OUR_VOLUMES
from outrider_crds.pod_template import PodTemplate
from outrider_crds.runtime_config import ADMIN_PORT, SERVING_PORT

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import dig, items, mapping, text

RUNTIME = "runtime"
"""Name of the serving container. A patch uses it for the container of a profiling pod, too."""
_MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "imagePullSecrets": "name",
    "resourceClaims": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort",
    "hostAliases": "ip", "claims": "name",
}  # fmt: skip
"""Lists that Kubernetes merges by a key of their items. Other lists are replaced."""
_RESERVED = (
    "activeDeadlineSeconds", "ephemeralContainers", "hostIPC", "hostNetwork", "hostPID", "nodeName", "restartPolicy",
    "terminationGracePeriodSeconds",
)  # fmt: skip
_OFF_BY_DEFAULT = ("hostIPC", "hostNetwork", "hostPID")
"""Reserved booleans that may be set to false, which is the default."""
_RESERVED_IN_RUNTIME = (
    "args", "command", "env", "envFrom", "image", "lifecycle", "livenessProbe", "ports", "readinessProbe",
    "resources", "startupProbe", "terminationMessagePath", "terminationMessagePolicy", "volumeMounts", "workingDir",
)  # fmt: skip
"""Fields that Outrider sets, or that podTemplate has itself."""
_SERVING_ONLY = ("containers", "preemptionPolicy", "priorityClassName", "schedulingGates", "topologySpreadConstraints")
_MERGED_ELSEWHERE = ("affinity",)
"""Fields that `placement` merges: the product's node affinity goes into each term."""
_OUR_PORTS = (SERVING_PORT, ADMIN_PORT)
_CONFINED = ("RuntimeDefault", "Localhost")
"""Types of seccomp and AppArmor profiles that baseline allows."""
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SAFE_SYSCTLS = (
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
)  # fmt: skip
"""Sysctls that baseline allows: they affect only the pod."""
_HANDLERS = (
    ("livenessProbe",), ("readinessProbe",), ("startupProbe",), ("lifecycle", "postStart"), ("lifecycle", "preStop"),
)  # fmt: skip
_APPARMOR_PREFIX = "container.apparmor.security.beta.kubernetes.io/"
"""Prefix of AppArmor annotations; a container's name follows. Kubelets before 1.30 have no field for it."""


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """Merge `patch` into `base`: maps by key (null removes), lists by their merge key. name: name of the field."""
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {**base, **{key: merged(base.get(key), item, key) for key, item in patch.items()}}
        return {key: item for key, item in both.items() if item is not None}
    if isinstance(base, list) and isinstance(patch, list) and name in (*_MERGE_KEYS, "tolerations"):
        return _merged_lists(base, patch, _MERGE_KEYS.get(name))
    return patch


def _merged_lists(base: list[Any], patch: list[Any], key: str | None) -> list[Any]:
    if key is None or not all(isinstance(item, dict) for item in (*base, *patch)):
        return [*base, *patch]
    over = {repr(item.get(key)): item for item in patch}  # a key may be of any type: Kubernetes will say so
    kept = [merged(item, over.pop(repr(item.get(key)), {})) for item in base]
    return [*kept, *over.values()]


def patched(pod: Object, template: PodTemplate, container: str, *, serving: bool = True) -> Object:
    """The pod spec with podTemplate's other fields merged into it. container: name of its runtime container.

    A profiling pod gets the fields that it needs to run, but no containers that would outlive the measurement.
    """
    skipped = (*_MERGED_ELSEWHERE, *(() if serving else _SERVING_ONLY))
    result: Object = merged(pod, {name: value for name, value in template.others.items() if name not in skipped})
    runtime = next((item for item in items(template.others, "containers") if item.get("name") == RUNTIME), None)
    if serving or runtime is None:
        return result
    return merged(result, {"containers": [{**runtime, "name": container}]})  # type: ignore[no-any-return]


def patch_problems(template: PodTemplate) -> Iterator[str]:
    """A sentence for each field of podTemplate that must not be set."""
    others = template.others
    for name in _RESERVED:
        if name in others and not (name in _OFF_BY_DEFAULT and others[name] is False):
            yield f"spec.podTemplate.{name} is not a user's to set: remove it"
    for name, shape in (("containers", list), ("securityContext", dict)):
        if not isinstance(others.get(name, shape()), shape):
            yield f"spec.podTemplate.{name} must not take the place of Outrider's: name what is to change in it"
    for kind in ("containers", "initContainers"):
        for container in items(others, kind):
            yield from _problems_of(container, f"spec.podTemplate.{kind}[{text(container, 'name')}]")
    yield from pod_problems(mapping(others, "securityContext"), "spec.podTemplate.securityContext")
    yield from annotation_problems(template.annotations, "spec.podTemplate.annotations")


def _problems_of(container: Object, where: str) -> Iterator[str]:
    is_runtime = text(container, "name") == RUNTIME
    if is_runtime:
        for name in _RESERVED_IN_RUNTIME:
            if name in container:
                yield f"{where}.{name} is Outrider's, or a field of podTemplate itself: remove it"
    if not isinstance(container.get("securityContext", {}), dict):
        yield f"{where}.securityContext must not take the place of Outrider's: name what is to change in it"
    context, place = mapping(container, "securityContext"), f"{where}.securityContext"
    yield from container_problems(context, place, is_runtime=is_runtime)
    yield from handler_problems(container, where)
    for mount in items(container, "volumeMounts"):
        if text(mount, "name").startswith(OUR_VOLUMES):
            yield f"{where}.volumeMounts names {text(mount, 'name')}, a volume of Outrider's: use one of your own"
    for port in items(container, "ports"):
        if port.get("hostPort"):
            yield f"{where}.ports opens port {port['hostPort']} of the node: remove hostPort"
        elif port.get("containerPort") in _OUR_PORTS:
            yield f"{where}.ports names {port['containerPort']}, a port of Outrider's: choose another"


def writable_host_mount(template: PodTemplate) -> str:
    """The mount through which a container of podTemplate could write to the node; empty without one.

    Admission already refuses such mounts of the runtime container.
    """
    hosts = {volume.name for volume in template.volumes if volume.host_path is not None}
    for kind in ("containers", "initContainers"):
        for container in items(template.others, kind):
            for mount in items(container, "volumeMounts"):
                if text(mount, "name") in hosts and mount.get("readOnly") is not True:
                    return f"spec.podTemplate.{kind}[{text(container, 'name')}].volumeMounts[{text(mount, 'name')}]"
    return ""


def pod_problems(context: Object, where: str) -> Iterator[str]:
    """A sentence for each forbidden field of a pod's securityContext."""
    yield from _baseline(context, where)
    yield from _weakened(context, where, {"runAsNonRoot": True})
    for sysctl in items(context, "sysctls"):
        if sysctl.get("name") not in _SAFE_SYSCTLS:
            yield f"{where}.sysctls sets {sysctl.get('name')}, which is not among Kubernetes' safe ones: remove it"


def container_problems(context: Object, where: str, *, is_runtime: bool) -> Iterator[str]:
    """A sentence for each forbidden field of a container's securityContext."""
    yield from _baseline(context, where)
    for name in ("privileged", "allowPrivilegeEscalation"):
        if context.get(name):
            yield f"{where}.{name} takes a container out of its sandbox: remove it"
    if context.get("procMount", "Default") != "Default":
        yield f"{where}.procMount takes a container out of its sandbox: remove it"
    if added := mapping(context, "capabilities").get("add"):
        yield f"{where}.capabilities.add gives {added} of the node: remove it"
    if is_runtime:
        ours = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True}
        yield from _weakened(context, where, ours)
        yield from _kept_capabilities(context, where)


def handler_problems(container: Object, where: str) -> Iterator[str]:
    """A sentence for each probe and hook that makes the kubelet call another host than the pod, from the node."""
    for path in _HANDLERS:
        for kind in ("httpGet", "tcpSocket"):
            if dig(container, *path, kind, "host"):
                yield f"{where}.{'.'.join((*path, kind))}.host makes the node call that host: remove it"


def annotation_problems(annotations: Mapping[str, str], where: str) -> Iterator[str]:
    """A sentence for each annotation that turns AppArmor off."""
    for name, value in annotations.items():
        if name.startswith(_APPARMOR_PREFIX) and value != "runtime/default" and not value.startswith("localhost/"):
            yield f"{where}[{name}] takes a container out of its sandbox: remove it"


def _baseline(context: Object, where: str) -> Iterator[str]:
    for name in ("seccompProfile", "appArmorProfile"):
        profile = context.get(name)
        if profile is not None and mapping(context, name).get("type", _CONFINED[0]) not in _CONFINED:
            yield f"{where}.{name} takes a container out of its sandbox: remove it, or choose RuntimeDefault"
    options = mapping(context, "seLinuxOptions")
    if (options.get("type") or "") not in _SELINUX_TYPES:
        yield f"{where}.seLinuxOptions.type {options['type']} takes a container out of its sandbox: remove it"
    for name in ("user", "role"):
        if options.get(name):
            yield f"{where}.seLinuxOptions.{name} takes a container out of its sandbox: remove it"
    if mapping(context, "windowsOptions").get("hostProcess"):
        yield f"{where}.windowsOptions.hostProcess takes a pod out of its sandbox: remove it"


def _weakened(context: Object, where: str, ours: Mapping[str, bool]) -> Iterator[str]:
    """A sentence for each field that weakens Outrider's settings (`ours`).

    User 0 is root. Without a seccomp profile a pod runs unconfined if the kubelet has no default.
    """
    for name, value in ours.items():
        if context.get(name, value) is not value:
            yield f"{where}.{name} must stay {str(value).lower()}: remove the line"
    if context.get("runAsUser") == 0:
        yield f"{where}.runAsUser must not be 0, which is root: choose another"
    if not isinstance(context.get("seccompProfile", {}), dict):
        yield f"{where}.seccompProfile must not be removed: name a profile, or remove the line"


def _kept_capabilities(context: Object, where: str) -> Iterator[str]:
    if not isinstance(context.get("capabilities", {}), dict):
        yield f"{where}.capabilities must not be removed: remove the line"
    dropped = mapping(context, "capabilities").get("drop", ["ALL"])
    if not isinstance(dropped, list) or "ALL" not in dropped:
        yield f"{where}.capabilities.drop must contain ALL: add ALL, or remove the line"
