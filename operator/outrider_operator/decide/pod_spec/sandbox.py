"""Find security settings in `spec.podTemplate` that violate Pod Security "baseline" or weaken Outrider's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import dig, items, mapping

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
