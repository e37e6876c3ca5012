"""Read the state of serving pods: ready, waiting for a node, or in trouble, with a sentence about the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice

from outrider_crds.status import ConditionReason

from outrider_operator.cluster_model import GROUPS_LABEL, REVISION_LABEL, Object
from outrider_operator.validation.reading import (
    condition_of,
    cut,
    integer,
    is_being_deleted,
    is_true,
    items,
    label,
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
_CRASH_IS_OVER_S = 600.0
"""Run time after which the kubelet restarts a container without back-off again."""
_LAST_LINES = 4
_SIGNALLED = 128
"""Exit codes from here on are those of signals: the other pods of a group get one when it is made again."""
_PATIENCE_S = 30.0
"""Age from which a volume that fails to mount is trouble. At first a ConfigMap may just be missing."""
MOST_TOLERATIONS = 256
"""Tolerations that are read: a spec has 16 and admission adds a few, but users may add hundreds to each pod."""
_UNFINISHED_NODE = ("node.cloudprovider.kubernetes.io/uninitialized", "karpenter.sh/unregistered")
"""Taints of nodes that are joining. The taint `not-ready` is left out, since broken nodes have it as well."""
LOOK_AGAIN_S = 15.0
"""Seconds between looks at what no watch delivers: the events of pods that are being created, a download's progress."""


@dataclass(frozen=True)
class Trouble:
    """Why a pod cannot get ready by itself."""

    reason: ConditionReason
    message: str


@dataclass(frozen=True)
class Pods:
    """The serving pods of one service that are not being deleted."""

    living: tuple[Object, ...]
    at: float
    """Unix seconds."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Pod name -> newest Warning event of a pod that has no container yet."""
    forbidden: Trouble | None = None
    """Why the API server refuses new pods of the Deployment."""
    provisioning: Mapping[str, str] = field(default_factory=dict)
    """Pod name -> message of an autoscaler about the node that it adds for the pod."""
    ended: tuple[Object, ...] = ()
    """Pods that ended for good within the last minutes, newest first: evicted, or refused by their node."""
    workers: tuple[Object, ...] = ()
    """Pods of groups other than leaders. A leader is not ready before they have joined it."""
    crashed: tuple[Object, ...] = ()
    """Pods of groups that are being deleted since a container of theirs crashed: each crash makes the whole group
    again, so no pod of a group crashes twice."""

    @property
    def with_workers(self) -> tuple[Object, ...]:
        return (*self.living, *self.workers)

    @cached_property
    def ready(self) -> tuple[Object, ...]:
        return tuple(pod for pod in self.living if is_ready(pod))

    @cached_property
    def tolerations(self) -> tuple[Object, ...]:
        """Tolerations of the pods, including those that admission added. Equal neighbours count once."""
        groups = groupby(items(pod, "spec", "tolerations") for pod in self.living)
        return tuple(islice((toleration for tolerations, _ in groups for toleration in tolerations), MOST_TOLERATIONS))

    def starting(self, within_s: float) -> list[Object]:
        """Pods that have a node, have not passed their start-up probe, and are younger than `within_s`."""
        return [
            pod
            for pod in self.living
            if text(pod, "spec", "nodeName")
            and not any(status.get("started") for status in items(pod, "status", "containerStatuses"))
            and self._trouble_of(pod) is None
            and self.at - (unix_seconds(text(pod, "metadata", "creationTimestamp")) or 0.0) < within_s
        ]

    def trouble(self, revision: str | None = None) -> Trouble | None:
        """Trouble of the first unready pod, of `revision` or of any; else of creating pods; None without any."""
        troubles = (trouble for pod, trouble in self._unready if revision in (None, revision_of(pod)))
        return next(filter(None, troubles), self.forbidden) or self._endings(revision) or self._crash(revision)

    def is_well(self, pod: Object) -> bool:
        """Is the pod ready, and does no container of it end again and again?"""
        return is_ready(pod) and self._trouble_of(pod) is None

    def sickness(self) -> Trouble | None:
        """Trouble of pods of which none is well; None while one is, and while it may still get ready by itself."""
        if any(self.is_well(pod) for pod in self.living):
            return None
        return next(filter(None, map(self._trouble_of, self.living)), None) or self.trouble()

    def why_not_ready(self, revision: str | None = None) -> str:
        """A sentence about pods that are not ready; empty if there is nothing to report."""
        if (trouble := self.trouble(revision)) is not None:
            return trouble.message
        of_it = (pod for pod, _ in self._unready if revision in (None, revision_of(pod)))
        starting = next((self._still_starting(pod) for pod in of_it), "")
        ended = next((how_it_ended(pod) for pod in self.ended if revision in (None, revision_of(pod))), "")
        return ". ".join(sentence for sentence in (starting, ended) if sentence)

    def _crash(self, revision: str | None) -> Trouble | None:
        """Trouble if a group is being made again after a crash."""
        of_it = (pod for pod in self.crashed if revision in (None, revision_of(pod)))
        crashes = (_crash(pod, status, "") for pod in of_it for status in _crashed_containers(pod))
        sentence = next(crashes, "")
        return Trouble(ConditionReason.POD_CRASHING, f"{sentence}. Its group is made again") if sentence else None

    def _endings(self, revision: str | None) -> Trouble | None:
        """Trouble if a pod and its replacement both ended: the next one will probably end, too."""
        ended = [pod for pod in self.ended if revision in (None, revision_of(pod))]
        again = next((pod for pod in ended if any(_replaces(pod, other) for other in ended if other is not pod)), None)
        return Trouble(ConditionReason.POD_ENDED, how_it_ended(again)) if again is not None else None

    def node_in_the_making(self, pod: Object) -> str:
        """Evidence that a node for `pod` is being added; empty without any."""
        if sentence := self.provisioning.get(name_of(pod)):
            return cut(sentence, 300)
        taint = next((taint for taint in _UNFINISHED_NODE if taint in scheduler_says(pod)), "")
        return f"one has the taint {taint}" if taint else ""

    @cached_property
    def _unready(self) -> list[tuple[Object, Trouble | None]]:
        """Pods that are not ready, with their trouble. It is cached for the conditions: there may be 1,000 pods."""
        return [(pod, self._trouble_of(pod)) for pod in self.with_workers if not is_ready(pod)]

    def _trouble_of(self, pod: Object) -> Trouble | None:
        return _container_trouble(pod, self.at) or self._stuck(pod)

    def _stuck(self, pod: Object) -> Trouble | None:
        warning = self.warnings.get(name_of(pod), "")
        created = unix_seconds(text(pod, "metadata", "creationTimestamp"))
        if not warning or not is_being_created(pod) or created is None or self.at - created < _PATIENCE_S:
            return None
        return Trouble(ConditionReason.POD_CANNOT_START, f"Pod {name_of(pod)} cannot start: {cut(warning, 500)}")

    def _still_starting(self, pod: Object) -> str:
        if unschedulable_since(pod) is not None:
            node = self.node_in_the_making(pod)
            waits = f"waits for a node that is being made ({node})" if node else f"has no node: {scheduler_says(pod)}"
            return f"Pod {name_of(pod)} {waits}"
        warning = self.warnings.get(name_of(pod), "")
        return f"Pod {name_of(pod)} is starting" + (f": {cut(warning, 500)}" if warning else "")


def pods_of(
    deployment: Object | None,
    pods: Iterable[Object],
    warnings: Mapping[str, str],
    at: float,
    provisioning: Mapping[str, str] | None = None,
    workers: Iterable[Object] = (),
) -> Pods:
    living = tuple(pod for pod in pods if not is_being_deleted(pod) and not _has_ended(pod))
    recently = (pod for pod in pods if _has_ended(pod) and at - _ended_at(pod) < _CRASH_IS_OVER_S)
    ended = sorted((pod for pod in recently if not is_being_deleted(pod)), key=_ended_at, reverse=True)
    workers = tuple(workers)
    joining = tuple(pod for pod in workers if not is_being_deleted(pod) and not _has_ended(pod))
    grouped = (pod for pod in (*pods, *workers) if label(pod, GROUPS_LABEL) and is_being_deleted(pod))
    crashed = tuple(pod for pod in grouped if _crashed_containers(pod))
    return Pods(living, at, warnings, _forbidden(deployment), provisioning or {}, tuple(ended), joining, crashed)


def is_ready(pod: Object) -> bool:
    return is_true(pod, "Ready")


def revision_of(pod: Object) -> str:
    return label(pod, REVISION_LABEL)


def unschedulable_since(pod: Object) -> float | None:
    """Unix time since which the scheduler finds no node for `pod`; None if it has one or was not tried yet."""
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    since = unix_seconds(text(scheduled, "lastTransitionTime"))
    return since if since is not None else unix_seconds(text(pod, "metadata", "creationTimestamp"))


def scheduler_says(pod: Object) -> str:
    return cut(text(condition_of(pod, "PodScheduled"), "message"), 300)


def how_it_ended(pod: Object) -> str:
    """A sentence about a pod that ended for good, with the kubelet's message.

    It does not name the pod: the name of the next one would change the sentence each time.
    """
    reason, message = text(pod, "status", "reason"), text(pod, "status", "message")
    terminated = (mapping(status, "state", "terminated") for status in items(pod, "status", "containerStatuses"))
    last = next(filter(None, terminated), {})
    why = reason or text(last, "reason") or "no reason given"
    sentence = message or text(last, "message")
    return f"A pod ended for good ({why})" + (f": {cut(sentence, 500).rstrip('.')}" if sentence else "")


def _replaces(pod: Object, other: Object) -> bool:
    """Was `pod` created after `other` had ended? The kubelet may update the time of the end for a while."""
    created = unix_seconds(text(pod, "metadata", "creationTimestamp"))
    return created is not None and created >= _ended_at(other) - _PATIENCE_S


def _ended_at(pod: Object) -> float:
    """Unix time of the last change in the pod's status."""
    times = [text(pod, "metadata", "creationTimestamp")]
    times += [text(condition, "lastTransitionTime") for condition in items(pod, "status", "conditions")]
    statuses = items(pod, "status", "containerStatuses")
    times += [text(status, "state", "terminated", "finishedAt") for status in statuses]
    return max(unix_seconds(moment) or 0.0 for moment in times)


def is_being_created(pod: Object) -> bool:
    """True for a pod that has a node and no container yet. Only its events tell what delays it."""
    statuses = items(pod, "status", "containerStatuses")
    waiting = [text(status, "state", "waiting", "reason") for status in statuses]
    return (
        bool(text(pod, "spec", "nodeName"))
        and not is_being_deleted(pod)
        and text(pod, "status", "phase") in ("", "Pending")
        and all(reason in ("ContainerCreating", "PodInitializing") for reason in waiting)
    )


def _has_ended(pod: Object) -> bool:
    return text(pod, "status", "phase") in ("Succeeded", "Failed")


def _forbidden(deployment: Object | None) -> Trouble | None:
    """Why the API server refuses new pods of the Deployment: a quota, a policy, a missing priority class."""
    failure = condition_of(deployment or {}, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    sentence = without_made_up_name(text(failure, "message"))
    return Trouble(ConditionReason.POD_CANNOT_START, f"No pod can be made: {cut(sentence, 500)}")


def without_made_up_name(message: str) -> str:
    """`message` without the pod's name, which differs at each attempt and would change the condition each time."""
    return re.sub(r'pods "[^"]*" is ', "it is ", message)


def _container_trouble(pod: Object, now_s: float) -> Trouble | None:
    initial = [status for status in items(pod, "status", "initContainerStatuses") if not _is_done(status)]
    for status in (*initial, *items(pod, "status", "containerStatuses")):
        waiting = mapping(status, "state", "waiting")
        reason, message = text(waiting, "reason"), text(waiting, "message")
        if reason in _IMAGE_REASONS:
            return Trouble(ConditionReason.IMAGE_PULL_FAILED, _not_pulled(pod, status, reason, message))
        if reason in _START_REASONS:
            hint = _NO_IMAGE_VOLUMES_HINT if _NO_IMAGE_VOLUMES in message else ""
            sentence = f"Pod {name_of(pod)} cannot start ({reason}): {cut(message, 500)}{hint}"
            return Trouble(ConditionReason.POD_CANNOT_START, sentence)
        if reason == _CRASH_LOOP or _keeps_ending(status, now_s):
            return Trouble(ConditionReason.POD_CRASHING, _crash(pod, status, message or reason))
    return None


def _not_pulled(pod: Object, status: Object, reason: str, message: str) -> str:
    """Sentence about an image that is not there. The kubelet's message names it: it may be that of a model's volume."""
    named = _PULLED_IMAGE.search(message)
    own = text(status, "image")
    image = named[1] if named is not None else own or "its image"
    field = "podTemplate.image" if image == own else "source.oci of the models, podTemplate.image"
    said = f"Pod {name_of(pod)} cannot pull {image} ({reason}): {cut(message, 500)}"
    return f"{said}. Check {field} and podTemplate.imagePullSecrets"


def _is_done(status: Object) -> bool:
    """Has an initial container done its work?"""
    ended = mapping(status, "state", "terminated")
    return bool(ended) and integer(ended, "exitCode") == 0


def _keeps_ending(status: Object, now_s: float) -> bool:
    """Does a container crash now? restartCount alone includes crashes that it has recovered from."""
    if integer(status, "restartCount") < _CRASHES:
        return False
    finished_at = unix_seconds(text(status, "lastState", "terminated", "finishedAt"))
    return not status.get("started") or finished_at is None or now_s - finished_at < _CRASH_IS_OVER_S


def _crashed_containers(pod: Object) -> list[Object]:
    """Statuses of containers that ended by themselves before they were restarted, and not by a signal."""
    statuses = items(pod, "status", "containerStatuses")
    return [s for s in statuses if 0 < integer(s, "lastState", "terminated", "exitCode") < _SIGNALLED]


def _crash(pod: Object, status: Object, message: str) -> str:
    ended = mapping(status, "lastState", "terminated") or mapping(status, "state", "terminated")
    said = last_lines(text(ended, "message"), _LAST_LINES)
    if not ended:
        return f"Pod {name_of(pod)} cannot start: {cut(message, 500)}"
    code, why = integer(ended, "exitCode"), text(ended, "reason") or "no reason given"
    last = f"; its last lines: {cut(said, 900)}" if said else ""
    # The sentence omits the number of restarts, which would change it each time.
    return f"Pod {name_of(pod)} keeps ending with exit code {code} ({why}){last}"
