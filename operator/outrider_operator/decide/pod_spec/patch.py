"""`spec.podTemplate` on the pods that Outrider writes: a strategic merge, and what it must not touch.

Kubernetes validates the result. Refused here is what would take a pod out of Outrider's hands, or out of its sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider_crds.pod_rules import OUR_VOLUMES
from outrider_crds.pod_template import PodTemplate
from outrider_crds.runtime_config import ADMIN_PORT, SERVING_PORT

from outrider_operator.decide.pod_spec.sandbox import annotation_objections, container_objections, pod_objections
from outrider_operator.inbound.reading import items, mapping, text
from outrider_operator.model import Object

RUNTIME = "runtime"
"""Name of the serving container, by which a patch names it in a profiling pod, too."""
_MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "imagePullSecrets": "name",
    "resourceClaims": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort",
    "hostAliases": "ip", "claims": "name",
}  # fmt: skip
"""Lists that Kubernetes merges by a key of their items; others are replaced."""
_RESERVED = (
    "activeDeadlineSeconds", "ephemeralContainers", "hostIPC", "hostNetwork", "hostPID", "nodeName", "restartPolicy",
    "terminationGracePeriodSeconds",
)  # fmt: skip
_OFF_BY_DEFAULT = ("hostIPC", "hostNetwork", "hostPID")
"""Reserved booleans of which false changes nothing."""
_RESERVED_IN_RUNTIME = (
    "args", "command", "env", "envFrom", "image", "lifecycle", "livenessProbe", "ports", "readinessProbe",
    "resources", "startupProbe", "terminationMessagePath", "terminationMessagePolicy", "volumeMounts", "workingDir",
)  # fmt: skip
"""Outrider's, or fields of podTemplate itself."""
_SERVING_ONLY = ("containers", "preemptionPolicy", "priorityClassName", "schedulingGates", "topologySpreadConstraints")
_MERGED_ELSEWHERE = ("affinity",)
"""The product's node affinity goes into each of its terms (`placement`)."""
_OUR_PORTS = (SERVING_PORT, ADMIN_PORT)


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """`base` with `patch` over it: maps by key (null removes), lists by their merge key. name: of the field."""
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
    """The pod spec with podTemplate's other fields over it. container: name of the runtime container in it.

    A profiling pod takes those that help to run, and no containers that would outlive the measurement.
    """
    skipped = (*_MERGED_ELSEWHERE, *(() if serving else _SERVING_ONLY))
    result: Object = merged(pod, {name: value for name, value in template.others.items() if name not in skipped})
    runtime = next((item for item in items(template.others, "containers") if item.get("name") == RUNTIME), None)
    if serving or runtime is None:
        return result
    return merged(result, {"containers": [{**runtime, "name": container}]})  # type: ignore[no-any-return]


def objections(template: PodTemplate) -> Iterator[str]:
    """A sentence for each part of podTemplate that pods must not have."""
    others = template.others
    for name in _RESERVED:
        if name in others and not (name in _OFF_BY_DEFAULT and others[name] is False):
            yield f"spec.podTemplate.{name} is not a user's to set: remove it"
    for name, shape in (("containers", list), ("securityContext", dict)):
        if not isinstance(others.get(name, shape()), shape):
            yield f"spec.podTemplate.{name} must not take the place of Outrider's: name what is to change in it"
    for kind in ("containers", "initContainers"):
        for container in items(others, kind):
            yield from _container_objections(container, f"spec.podTemplate.{kind}[{text(container, 'name')}]")
    yield from pod_objections(mapping(others, "securityContext"), "spec.podTemplate.securityContext")
    yield from annotation_objections(template.annotations, "spec.podTemplate.annotations")


def _container_objections(container: Object, where: str) -> Iterator[str]:
    is_runtime = text(container, "name") == RUNTIME
    if is_runtime:
        for name in _RESERVED_IN_RUNTIME:
            if name in container:
                yield f"{where}.{name} is Outrider's, or a field of podTemplate itself: remove it"
    if not isinstance(container.get("securityContext", {}), dict):
        yield f"{where}.securityContext must not take the place of Outrider's: name what is to change in it"
    context, place = mapping(container, "securityContext"), f"{where}.securityContext"
    yield from container_objections(context, place, is_runtime=is_runtime)
    for mount in items(container, "volumeMounts"):
        if text(mount, "name").startswith(OUR_VOLUMES):
            yield f"{where}.volumeMounts names {text(mount, 'name')}, a volume of Outrider's: use one of your own"
    for port in items(container, "ports"):
        if port.get("hostPort"):
            yield f"{where}.ports opens port {port['hostPort']} of the node: remove hostPort"
        elif port.get("containerPort") in _OUR_PORTS:
            yield f"{where}.ports names {port['containerPort']}, a port of Outrider's: choose another"


def writable_host_mount(template: PodTemplate) -> str:
    """The mount by which a container of the patch could write to the node; empty without one. Admission refuses those
    of the runtime container."""
    hosts = {volume.name for volume in template.volumes if volume.host_path is not None}
    for kind in ("containers", "initContainers"):
        for container in items(template.others, kind):
            for mount in items(container, "volumeMounts"):
                if text(mount, "name") in hosts and mount.get("readOnly") is not True:
                    return f"spec.podTemplate.{kind}[{text(container, 'name')}].volumeMounts[{text(mount, 'name')}]"
    return ""
