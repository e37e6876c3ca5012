"""Why one pod does not run: its node, its gates, its volumes, and its containers, those of others included.

Pods that serve, workers of groups, and pods of Jobs are described alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider_crds.conditions import ConditionReason

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import (
    condition_of,
    created_s,
    cut,
    integer,
    is_being_deleted,
    is_true,
    items,
    last_lines,
    mapping,
    name_of,
    text,
    unix_seconds,
)

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CRASH_LOOP = "CrashLoopBackOff"
_START_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"})
"""Reasons why a container is not created, such as a missing Secret or a command that the image lacks."""
_PULLED_IMAGE = re.compile(r'image "([^"\s]+)"')
_NO_IMAGE_VOLUMES = 'failed to mkdir ""'
"""Words of a containerd before 2.1, which takes an image volume for a folder without a name."""
_NO_IMAGE_VOLUMES_HINT = (
    ". The node's container runtime mounts no images (source.oci): containerd 2.1 and CRI-O 1.31 do"
)
_CRASHES = 2
"""Restarts from which a pod that is not ready counts as crashing, also between two crashes."""
CRASH_IS_OVER_S = 600.0
"""Run time after which the kubelet restarts a container without back-off again."""
_LAST_LINES = 4
_SIGNALLED = 128
"""Exit codes from here on are those of signals: the other pods of a group get one when it is made again."""
PATIENCE_S = 30.0
"""Age from which a volume that fails to mount is trouble. At first a ConfigMap may just be missing."""


@dataclass(frozen=True)
class Trouble:
    """Why a pod cannot get ready by itself."""

    reason: ConditionReason
    message: str


def trouble_of(pod: Object, at: float, warning: str = "") -> Trouble | None:
    """Trouble of the first container that has any, init containers first; else of the pod's volumes.

    warning: newest Warning event of a pod that has no container yet."""
    troubles = (_container_trouble(pod, status, at) for status in _containers(pod))
    if (trouble := next(filter(None, troubles), None)) is not None:
        return trouble
    is_late = created_s(pod) > 0 and at - created_s(pod) >= PATIENCE_S
    if not (warning and is_late and is_being_created(pod)):
        return None
    return Trouble(ConditionReason.POD_CANNOT_START, f"Pod {name_of(pod)} cannot start: {cut(warning, 500)}")


def what_it_waits_for(pod: Object, warning: str = "", node_in_the_making: str = "") -> str:
    """A sentence about a pod that is not ready and has no trouble."""
    pod_name = f"Pod {name_of(pod)}"
    if gates := [text(gate, "name") for gate in items(pod, "spec", "schedulingGates")]:
        return cut(f"{pod_name} waits for its scheduling gates to be removed: {', '.join(gates)}", 500)
    if unschedulable_since(pod) is not None:
        node = node_in_the_making
        waits = f"waits for a node that is being made ({node})" if node else f"has no node: {scheduler_says(pod)}"
        return f"{pod_name} {waits}"
    if ended := next((status for status in _containers(pod) if _has_failed(status)), None):
        return f"{_whose(pod, ended)} ended with {how_container_ended(ended)}"
    if is_being_created(pod) and (init := _running_init(pod)):
        return f"{pod_name} waits for its init container {init}"
    if is_true(pod, "ContainersReady") and (why := text(condition_of(pod, "Ready"), "message")):
        return f"{pod_name} waits for its readiness gates: {cut(why, 500)}"
    return f"{pod_name} is starting" + (f": {cut(warning, 500)}" if warning else "")


def how_it_ended(pod: Object) -> str:
    """A sentence about a pod that ended for good, in the kubelet's words, those of an eviction, or its container's.

    It does not name the pod: the name of the next one would change the sentence each time.
    """
    disruption = condition_of(pod, "DisruptionTarget") if is_true(pod, "DisruptionTarget") else {}
    statuses = [status for status in _containers(pod) if mapping(status, "state", "terminated")]
    last = next((status for status in statuses if _has_failed(status)), statuses[0] if statuses else {})
    reasons = (text(pod, "status", "reason"), text(disruption, "reason"), text(last, "state", "terminated", "reason"))
    of_container = f"{_container(pod, last)}: ".lstrip(": ") + how_container_ended(last) if last else ""
    said = text(pod, "status", "message") or text(disruption, "message") or of_container
    why = next(filter(None, reasons), "no reason given")
    return f"A pod ended for good ({why})" + (f": {cut(said, 900).rstrip('.')}" if said else "")


def how_container_ended(status: Object) -> str:
    """Exit code, reason and last words of a container that ended, now or before it was restarted."""
    ended = mapping(status, "state", "terminated") or mapping(status, "lastState", "terminated")
    said = last_lines(text(ended, "message"), _LAST_LINES)
    last = f"; its last lines: {cut(said, 900)}" if said else ""
    return f"exit code {integer(ended, 'exitCode')} ({text(ended, 'reason') or 'no reason given'}){last}"


def crash_of(pod: Object) -> str:
    """A sentence about a container that ended by itself and not by a signal before it was restarted; else empty."""
    crashed = (s for s in _containers(pod) if 0 < integer(s, "lastState", "terminated", "exitCode") < _SIGNALLED)
    return next((_keeps_ending_sentence(pod, status) for status in crashed), "")


def unschedulable_since(pod: Object) -> float | None:
    """Unix time since which the scheduler finds no node for `pod`; None if it has one or was not tried yet."""
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    since = unix_seconds(text(scheduled, "lastTransitionTime"))
    return since if since is not None else created_s(pod)


def scheduler_says(pod: Object) -> str:
    return cut(text(condition_of(pod, "PodScheduled"), "message"), 300)


def is_being_created(pod: Object) -> bool:
    """True for a pod that has a node and no container of its own yet. Only its events tell what delays it."""
    statuses = items(pod, "status", "containerStatuses")
    waiting = [text(status, "state", "waiting", "reason") for status in statuses]
    return (
        bool(text(pod, "spec", "nodeName"))
        and not is_being_deleted(pod)
        and text(pod, "status", "phase") in ("", "Pending")
        and all(reason in ("ContainerCreating", "PodInitializing") for reason in waiting)
    )


def has_ended(pod: Object) -> bool:
    return text(pod, "status", "phase") in ("Succeeded", "Failed")


def ended_at(pod: Object) -> float:
    """Unix time of the last change in the pod's status."""
    times = [text(condition, "lastTransitionTime") for condition in items(pod, "status", "conditions")]
    times += [text(status, "state", "terminated", "finishedAt") for status in _containers(pod)]
    return max(created_s(pod), *(unix_seconds(moment) or 0.0 for moment in times), 0.0)


def without_made_up_name(message: str) -> str:
    """`message` without the pod's name, which differs at each attempt and would change the condition each time."""
    return re.sub(r'pods "[^"]*" is ', "it is ", message)


def _containers(pod: Object) -> list[Object]:
    """Statuses of init containers, native sidecars among them, and containers."""
    return [*items(pod, "status", "initContainerStatuses"), *items(pod, "status", "containerStatuses")]


def _container_trouble(pod: Object, status: Object, at: float) -> Trouble | None:
    waiting = mapping(status, "state", "waiting")
    reason, message = text(waiting, "reason"), text(waiting, "message")
    whose = _whose(pod, status)
    if reason in _IMAGE_REASONS:
        return Trouble(ConditionReason.IMAGE_PULL_FAILED, _not_pulled(whose, status, reason, message))
    if reason in _START_REASONS:
        hint = _NO_IMAGE_VOLUMES_HINT if _NO_IMAGE_VOLUMES in message else ""
        return Trouble(ConditionReason.POD_CANNOT_START, f"{whose} cannot start ({reason}): {cut(message, 500)}{hint}")
    if reason != _CRASH_LOOP and not _keeps_ending(status, at):
        return None
    if not (mapping(status, "lastState", "terminated") or mapping(status, "state", "terminated")):
        return Trouble(ConditionReason.POD_CRASHING, f"{whose} cannot start: {cut(message or reason, 500)}")
    return Trouble(ConditionReason.POD_CRASHING, _keeps_ending_sentence(pod, status))


def _whose(pod: Object, status: Object) -> str:
    """The pod, and which of its containers, where it has several."""
    container = _container(pod, status)
    return f"{container[0].upper()}{container[1:]} of pod {name_of(pod)}" if container else f"Pod {name_of(pod)}"


def _container(pod: Object, status: Object) -> str:
    """Which container of the pod; empty for the only one."""
    if status in items(pod, "status", "initContainerStatuses"):
        return f"init container {text(status, 'name')}"
    return "" if len(items(pod, "status", "containerStatuses")) == 1 else f"container {text(status, 'name')}"


def _not_pulled(whose: str, status: Object, reason: str, message: str) -> str:
    """Sentence about an image that is not there. The kubelet's message names it: it may be that of a model's volume."""
    named = _PULLED_IMAGE.search(message)
    own = text(status, "image")
    image = named[1] if named is not None else own or "its image"
    field = "podTemplate.image" if image == own else "source.oci of the models, podTemplate.image"
    said = f"{whose} cannot pull {image} ({reason}): {cut(message, 500)}"
    return f"{said}. Check {field} and podTemplate.imagePullSecrets"


def _keeps_ending(status: Object, at: float) -> bool:
    """Does a container crash now? restartCount alone includes ends that it has recovered from, and reboots of its node.
    One that runs again does if its last run was short and ended lately. Times that the kubelet lost tell nothing."""
    ended = mapping(status, "state", "terminated")
    is_done = bool(ended) and not integer(ended, "exitCode")
    if integer(status, "restartCount") < _CRASHES or is_done:
        return False
    if not status.get("started"):
        return True
    last = mapping(status, "lastState", "terminated")
    began, finished = unix_seconds(text(last, "startedAt")), unix_seconds(text(last, "finishedAt"))
    if began is None or finished is None:
        return False
    return finished - began < CRASH_IS_OVER_S and at - finished < CRASH_IS_OVER_S


def _keeps_ending_sentence(pod: Object, status: Object) -> str:
    # The number of restarts would change the sentence each time.
    before = {**status, "state": {}} if mapping(status, "lastState", "terminated") else status
    return f"{_whose(pod, status)} keeps ending with {how_container_ended(before)}"


def _has_failed(status: Object) -> bool:
    return integer(status, "state", "terminated", "exitCode") != 0


def _running_init(pod: Object) -> str:
    """The init container that runs now; empty without one. A native sidecar that has started goes on."""
    statuses = items(pod, "status", "initContainerStatuses")
    running = (status for status in statuses if "running" in mapping(status, "state") and not status.get("started"))
    return next((text(status, "name") for status in running), "")
